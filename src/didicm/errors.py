"""The one kind of error that is the user's to fix, and how it is worded."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec

MANY = 20  # names that no sentence should list


class UserError(ValueError):
    """Bad input: the message is one sentence that names the file or option and what to do.

    The command line prints it without a traceback and exits with 2.
    """


def reason(error: BaseException) -> str:
    """What an exception of somebody else's says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "--help lists the names") -> str:
    """The nearest known name, or the list of them: the end of a sentence about an unknown one.

    Of too many names there is no list; `otherwise` says where it is to be found.
    """
    names = sorted(map(str, known))
    close = get_close_matches(name, names, n=1, cutoff=0.7)
    if close:
        return f"did you mean {close[0]}?"
    return f"choose one of {', '.join(names)}" if len(names) <= MANY else otherwise


@contextmanager
def torch_required(what: str) -> Iterator[None]:
    """Say what is missing where PyTorch, and what comes with it, is not installed: exported models run without."""
    try:
        yield
    except ModuleNotFoundError as error:
        if find_spec("torch") is not None:
            raise
        raise UserError(f'{what} needs PyTorch: pip install "didicm[torch]"') from error
