"""From a name to a local folder: the Hugging Face Hub, its cache, and where a tokenizer can be had.

Cache, resuming, revisions, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``, ``HF_HOME`` and ``HF_TOKEN`` are huggingface_hub's own
and mean here what they mean there. What this module adds: which files of a repository are wanted, what counts as a
path (and so never goes to the network), and one readable error for each way a download fails.
"""

from __future__ import annotations

import difflib
import errno
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from openelm_mlx.errors import OpenELMError
from openelm_mlx.files import expand

TOKENIZER_SOURCES: tuple[str, ...] = (
    "mlx-community/OpenELM-270M-Instruct",
    "mlx-community/OpenELM-3B",
    "NousResearch/Llama-2-7b-hf",
    "hf-internal-testing/llama-tokenizer",
)
"""Repositories that hold OpenELM's tokenizer (Llama 2's) and ask for no licence, best first."""

_PLAIN_FILES = ["*.json", "*.jinja", "tokenizer.model"]
_SAFETENSORS = ["*.safetensors"]
_TORCH_BIN = ["pytorch_model*.bin"]
# The patterns above also match inside folders ("original/params.json"); a model's own files lie at the top.
# Code is never wanted: nothing here runs a model's own Python.
_NEVER = ["*/*", "*.py"]

_PATH_ENDINGS = (".pt", ".bin", ".safetensors", ".json", ".model", ".yaml")
_NETWORK_MODULES = {"httpx2", "httpcore2", "httpx", "httpcore", "requests", "urllib3"}


class HubError(OpenELMError):
    """A name that does not lead to a local folder. ``reason`` is the short form, a few words without the way out."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


def resolve(
    name_or_path: str | Path, *, revision: str | None = None, weights: bool = True, quiet: bool = False
) -> Path:
    """The local folder (or file) behind a path or a Hub name, downloaded if need be.

    An existing path is returned as it is. A name (``org/name``) becomes the folder of its snapshot in the
    cache: the JSON files, chat templates, tokenizer and safetensors weights, or, where there are no safetensors, the
    ``pytorch_model*.bin`` files.

    Args:
        name_or_path: a Hub name or a path. A :class:`~pathlib.Path` is always a path.
        revision: branch, tag or commit of a Hub repository. An error with a local path.
        weights: False leaves the weight files out.
        quiet: no progress bars on stderr.

    Raises:
        HubError: no such file, folder, repository or revision, or the download failed.
    """
    name = os.fspath(name_or_path)
    local = expand(name)
    if name and os.path.exists(local):  # noqa: PTH110 (False, not an exception, in a folder we may not read)
        if revision is not None:
            raise HubError(
                f"{name} is a local {'folder' if local.is_dir() else 'file'}, so it has no revision {revision!r}: "
                "a revision goes with a Hub name (org/name)."
            )
        return local
    if isinstance(name_or_path, Path) or _looks_like_a_path(name):
        raise _no_such_path(name, local)
    return _download(name, revision=revision, weights=weights, quiet=quiet)


def commit_of(folder: Path) -> str | None:
    """The commit of a snapshot folder in the cache of huggingface_hub; None for any other path."""
    return folder.name if folder.parent.name == "snapshots" else None


def find_tokenizer(
    report: Callable[[str], None], objection: Callable[[Path], str | None] = lambda folder: None
) -> tuple[Path, str] | None:
    """The first of :data:`TOKENIZER_SOURCES` that can be had: its folder and its name; None when there is none.

    Only tokenizer and config files are downloaded.

    Args:
        report: gets one line a try.
        objection: says, in a few words, why a folder's tokenizer will not do; None when it will.
    """
    for name in TOKENIZER_SOURCES:
        try:
            folder = resolve(name, weights=False, quiet=True)
        except HubError as error:
            report(f"tokenizer: {name} is not available ({error.reason})")
            continue
        if not any((folder / file).is_file() for file in ("tokenizer.model", "tokenizer.json")):
            report(f"tokenizer: {name} holds no tokenizer")
            continue
        if (why := objection(folder)) is not None:
            report(f"tokenizer: {name} will not do ({why})")
            continue
        report(f"tokenizer: taken from {name}")
        return folder, name
    return None


def _looks_like_a_path(name: str) -> bool:
    return (
        not name
        or name.startswith((".", "/", "~"))
        or "\\" in name
        or name.count("/") != 1
        or name.endswith("/")
        or name.lower().endswith(_PATH_ENDINGS)
    )


def _no_such_path(name: str, local: Path) -> HubError:
    if not name:
        return HubError("The name of the model is empty: give a folder, a file or a Hub name (org/name).")
    if "://" in name:
        return HubError(f"{name} is a web address: give the repository's name alone, as in apple/OpenELM-270M.")
    bare = not set(name) & set("/\\~ ") and not name.lower().endswith(_PATH_ENDINGS)
    hint = " A model on the Hub is named with its owner, as in apple/OpenELM-270M." if bare else ""
    return HubError(f"No such file or folder: {local.absolute()}.{_similar(local)}{hint}", "no such file or folder")


def _similar(local: Path) -> str:
    """A sentence naming existing neighbours with nearly the same name, or nothing."""
    try:
        neighbours = [entry.name for entry in local.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(local.name, neighbours, n=3)
    return f" Similar names there: {', '.join(close)}." if close else ""


def _download(name: str, *, revision: str | None, weights: bool, quiet: bool) -> Path:
    """The snapshot folder of a repository, with every file wanted of it."""
    try:
        with _progress(not quiet):
            folder = _snapshot(name, revision, _PLAIN_FILES + (_SAFETENSORS if weights else []))
            if weights and not any(folder.glob("*.safetensors")):
                folder = _snapshot(name, revision, _PLAIN_FILES + _TORCH_BIN)
    except Exception as error:  # whatever huggingface_hub, its HTTP client or its storage client raise
        raise _explain(error, name, revision) from error
    if weights and not any(any(folder.glob(pattern)) for pattern in _SAFETENSORS + _TORCH_BIN):
        raise HubError(
            f"{name} holds no weights this can read (*.safetensors or pytorch_model*.bin). "
            f"What was downloaded is in {folder}.",
            "no weights",
        )
    return folder


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_NEVER))


@contextmanager
def _progress(shown: bool) -> Iterator[None]:
    """huggingface_hub's progress bars, silenced inside the block when not ``shown``."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public and documented, but not in its __all__
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if shown or are_progress_bars_disabled():
        yield
        return
    with warnings.catch_warnings():
        # It warns where HF_HUB_DISABLE_PROGRESS_BARS=0 outranks us; the person asked for the bars, so be it.
        warnings.simplefilter("ignore")
        disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _explain(error: Exception, name: str, revision: str | None) -> HubError:
    """The one clear error for whatever a download raised."""
    for link in _chain(error):
        explained = _explain_hub(link, name, revision) or _explain_system(link, name)
        if explained is not None:
            return explained
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return HubError(f"Downloading {name} failed ({type(error).__name__}: {first_line}).", "the download failed")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and what caused it: huggingface_hub wraps "offline" or "no connection" in "not in the cache"."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _explain_hub(error: BaseException, name: str, revision: str | None) -> HubError | None:
    """The errors in which the Hub, or huggingface_hub, says what is wrong."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name}"
    if isinstance(error, errors.HFValidationError):
        return HubError(
            f"{name!r} is neither a file or folder here nor a possible Hub name (org/name).", "not a possible name"
        )
    if isinstance(error, errors.GatedRepoError):  # before RepositoryNotFoundError, whose subclass it is
        return HubError(
            f"{name} is gated: accept its licence on {page} while logged in, then run `hf auth login` "
            "(or set HF_TOKEN) and try again.",
            "gated",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            f"{name} is neither a folder here nor a repository on {constants.ENDPOINT}: check the spelling; for a "
            f"private repository run `hf auth login` or set HF_TOKEN.{_similar(Path(name))}",
            "no such repository",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(
            f"{name} has no revision {revision or 'main'!r}: its branches and tags are on {page}/tree/main.",
            "no such revision",
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return HubError(
            f"{name} is not, or not completely, in the cache ({constants.HF_HUB_CACHE}) and HF_HUB_OFFLINE is set: "
            "unset it once to download, or give a local folder.",
            "offline and not in the cache",
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_status(error.response.status_code, name, constants.ENDPOINT)
    return None


def _explain_status(status: int, name: str, endpoint: str) -> HubError:
    hint = "try again later."
    if status in (401, 403):
        hint = "the token is not accepted for it. Run `hf auth login` again, or correct HF_TOKEN."
    elif status == 429:
        hint = "too many requests. Wait a few minutes; after `hf auth login` the limits are higher."
    return HubError(f"{endpoint} answered {status} for {name}: {hint}", f"the server answered {status}")


def _explain_system(error: BaseException, name: str) -> HubError | None:
    """A full or unwritable disk, or no way through the network."""
    from huggingface_hub import constants

    code = error.errno if isinstance(error, OSError) else None
    # The storage client is not Python and passes the system's error on as text.
    if code in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
        return HubError(
            f"The disk is full: {name} does not fit into the cache ({constants.HF_HUB_CACHE}). Free some space or set "
            "HF_HOME to a folder on another disk, then run again: finished files are kept.",
            "disk full",
        )
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return HubError(
            f"The cache ({constants.HF_HUB_CACHE}) cannot be written: correct its permissions, or set HF_HOME to a "
            "folder of yours.",
            "the cache cannot be written",
        )
    if isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.split(".")[0] in _NETWORK_MODULES:
        return HubError(
            f"{constants.ENDPOINT} cannot be reached, or the connection broke, and {name} is not completely in the "
            f"cache ({constants.HF_HUB_CACHE}): check the network, proxy and HF_ENDPOINT, then run again. "
            f"({type(error).__name__}: {error})",
            "cannot be reached",
        )
    return None
