"""The package's exceptions: what a user can put right, said in one sentence, and the wish to go on later."""

import difflib
from collections.abc import Iterable


class GcjaxError(Exception):
    """An error whose message names the file, tensor or option at fault and says what to do."""


class Stopped(GcjaxError):
    """A signal asked to stop and everything so far is saved: the same command resumes. The exit status is then `REQUEUE`."""


REQUEUE = 75  # EX_TEMPFAIL of sysexits.h; launch files take it as the wish to be started again


def nearest(name: object, known: Iterable[object]) -> str:
    """The end of an error message about a misspelt name: `did you mean 'x'?`, or all the names there are."""
    names = [str(item) for item in known]
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names)}"


def some(names: Iterable[object], most: int = 5) -> str:
    """The first few names, and how many more there are."""
    shown = [str(name) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
