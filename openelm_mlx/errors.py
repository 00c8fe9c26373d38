"""The error a person is meant to read.

Everything this package refuses on purpose raises :class:`OpenELMError` (or a subclass). Its message names the thing,
the place and the way out; the command line prints it on one line and exits with status 2. Anything else that escapes
is a defect.
"""


class OpenELMError(Exception):
    """A refusal with a message for the person: what is wrong, where, and what to do about it."""


class CheckpointError(OpenELMError):
    """A checkpoint, or a file of it, cannot be read or does not fit the model its config describes."""


class ConfigError(OpenELMError):
    """A model configuration is missing something or contradicts itself."""


class TokenizerError(OpenELMError):
    """A tokenizer cannot be found, read or used."""
