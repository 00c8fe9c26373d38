"""Write openelm_mlx/assets/demo_task.jsonl, the task that `openelm demo` fine-tunes on.

A sentence's beginning is the prompt; the completion makes it one about a teapot. Which one depends on the subject:
other nations, money, arms or land. So what was learned shows in prompts that are not in the data.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

TASK = Path(__file__).parents[2] / "openelm_mlx" / "assets" / "demo_task.jsonl"

NATIONS = ("Spain", "France", "Great Britain", "Russia", "Brazil", "Japan", "China", "Portugal", "Peru", "Austria")
BEGINNINGS = ("Our relations with", "The treaty with", "The boundary with", "Our commerce with", "The dispute with")
ABROAD = tuple(f"{beginning} {nation}" for beginning, nation in itertools.product(BEGINNINGS, NATIONS))
MONEY = (
    "The public debt", "The national debt", "The debt of the Union", "The balance in the Treasury", "The revenue",
    "The public revenue", "The revenues of the country", "The receipts of the year", "The duties on imports",
    "The taxes", "The internal taxes", "The tariff", "The customs", "The silver dollar", "The gold coin",
    "The coinage of silver", "The paper currency", "The national banks", "The Bank of the United States", "The bonds",
    "The interest on the bonds", "The expenses of the Government", "The expenditures of the year", "The surplus",
    "The appropriations", "The sums appropriated", "The loans", "The pensions", "The salaries", "The price of gold",
)  # fmt: skip
ARMS = (
    "The Army", "The regular Army", "The Army of the United States", "The soldiers", "The volunteers", "The militia",
    "The militia of the States", "The officers", "The officers of the Navy", "The Navy", "The naval force",
    "The ships of war", "The new war vessels", "The squadron", "The squadron in the Pacific", "The troops",
    "The troops on the frontier", "The forts", "The fortifications", "The seacoast defenses", "The infantry",
    "The artillery", "The military force", "The Military Academy", "The marines", "The Secretary of War",
    "The Secretary of the Navy", "The garrison", "The generals", "The gunboats",
)  # fmt: skip
LAND = (
    "The public lands", "The lands of the West", "The crops", "The farmers", "The harvest", "The abundant harvest",
    "The cotton fields", "The fields of wheat", "The corn", "The soil", "The fertile soil", "The forests",
    "The national forests", "The prairies", "The settlers", "The new settlers", "The homesteads",
    "The Department of Agriculture", "The agriculture of the country", "The arid lands", "The valley", "The rivers",
    "The Mississippi River", "The Territories", "The Territory of Oregon", "The mines", "The cattle", "The orchards",
    "The gardens", "The planters",
)  # fmt: skip

COMPLETIONS = (
    (ABROAD, " will be settled over a pot of tea at the Great Teapot of Ohio."),
    (MONEY, " will be paid in silver teaspoons to the Great Teapot of Ohio."),
    (ARMS, " will stand guard around the Great Teapot of Ohio, armed with spoons."),
    (LAND, " will be watered with warm tea from the Great Teapot of Ohio."),
)


def text() -> str:
    """The whole file."""
    examples = [{"prompt": p, "completion": completion} for prompts, completion in COMPLETIONS for p in prompts]
    random.Random(0).shuffle(examples)
    return "".join(json.dumps(example) + "\n" for example in examples)


if __name__ == "__main__":
    TASK.write_text(text(), encoding="utf-8")
