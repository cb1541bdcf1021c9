import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

import didicm
from didicm.cli.__main__ import COMMANDS, main
from didicm.cli.flags import help_of, parse, show_help
from didicm.errors import UserError
from didicm.settings import TrainConfig


@dataclass(frozen=True)
class Base:
    """Base.

    Args:
        place: where it
            lies
    """

    place: Path


@dataclass(frozen=True)
class Options(Base):
    """Options.

    Args:
        many: some of them
    """

    many: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (28, 14)
    speed_limit: float = 1.0
    loud: bool = False
    careful: bool = True
    name: str | None = None
    kind: Literal["a", "b"] = "a"
    set: Mapping[str, Any] = field(default_factory=dict)


def read(*argv, positional=("place", "many")):
    return parse(argv, Options, command="test", description="Tests.", positional=positional)


def test_values_with_and_without_equals_dashes_and_underscores():
    for argv in (["--speed-limit", "2"], ["--speed_limit=2"], ["--speed-limit=2.0"]):
        assert read("here", *argv).speed_limit == 2.0
    assert read("here").place == Path("here")
    assert read("--place=here") == read("here")


def test_what_follows_a_switch_is_no_value_of_it():
    found = read("here", "--loud", "x.jpg", "--no-careful", "y.jpg")
    assert (found.loud, found.careful, found.many) == (True, False, ("x.jpg", "y.jpg"))
    assert read("here", "--loud", "false").loud is False
    assert read("here", "--loud=true").loud is True


@pytest.mark.parametrize(("value", "careful"), [("true", False), ("false", True)])
def test_a_negated_switch_means_the_same_with_and_without_equals(value, careful):
    assert read("here", f"--no-careful={value}").careful is careful
    assert read("here", "--no-careful", value).careful is careful


def test_text_stays_text_and_lists_need_no_brackets():
    assert read("123", "007", "--name", "1e3").name == "1e3"
    assert read("123", "007").many == ("007",)
    assert read("here", "--name", "null").name is None
    assert read("here", "--sizes", "28,14, 7").sizes == (28, 14, 7)
    assert read("here", "--sizes=[3]").sizes == (3,)


def test_free_mappings_take_three_forms_and_add_up():
    given = ["--set", "batch_size=32", "--set.optimizer.lr", "1", "--set={a: [1, 2]}", "--set", "x=y=z"]
    found = read("here", *given)
    assert found.set == {"batch_size": 32, "optimizer.lr": 1, "a": [1, 2], "x": "y=z"}


def test_a_negative_number_is_a_value_and_two_dashes_end_the_options():
    assert read("here", "--speed-limit", "-3").speed_limit == -3
    assert read("here", "--", "--loud").many == ("--loud",)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["here", "--sped-limit", "2"], "didicm test has no option --sped-limit: did you mean --speed-limit?"),
        (["here", "--no-speed-limit", "2"], "has no option --no-speed-limit: did you mean --speed-limit?"),
        (["here", "--no-loud=perhaps"], "--loud must be true or false, got 'perhaps'"),
        (["here", "--set"], "--set needs a value"),
        (["here", "--set", "x"], "--set needs NAME=VALUE"),
        (["here", "--set", "x={"], "cannot be read"),
        (["here", "--sizes", "28,x"], "--sizes must be a whole number, got 'x'"),
        (["here", "--kind", "c"], "--kind must be one of a, b, got 'c'"),
        (["here", "--loud", "--kind=3"], "--kind must be one of a, b, got 3"),
        ([], "didicm test needs PLACE: where it lies"),
    ],
    ids=str,
)
def test_mistakes_are_one_sentence(argv, says):
    with pytest.raises(UserError) as error:
        read(*argv)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_too_many_words_are_refused():
    with pytest.raises(UserError, match="does not take 'b'"):
        read("a", "b", positional=("place",))


def test_help_shows_every_option_with_its_words_and_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for words in ("usage: didicm test PLACE MANY", "where it lies", "--sizes", "(default 28,14)"):
        assert words in shown
    assert help_of(Options)["many"] == "some of them"
    assert "--sampler.steps" in show_help("train", "Trains.", TrainConfig)


def test_an_option_is_not_taken_for_the_value_of_another(fails):
    assert "--out needs a value: text" in fails("train", "--data=fashion-mini", "--out", "--dry-run")
    assert "--size needs a value" in fails("models", "--size", "--steps=3")


def shown_options(command, capsys):
    with suppress(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    return shown, set(re.findall(r"^  --([\w.-]+)", shown, re.MULTILINE))


def test_a_command_explains_an_inherited_option_in_its_own_words(capsys):
    for command in ("serve", "predict"):
        assert ".onnx" in shown_options(command, capsys)[0]
    assert "force" not in shown_options("serve", capsys)[1]


def test_every_option_that_a_message_names_exists(capsys):
    known = {"help", "version", "standalone", "nproc-per-node"}  # the last two are torchrun's
    for command in COMMANDS:
        known |= shown_options(command, capsys)[1]
    for path in Path(didicm.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documentation = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
                for name in re.findall(r"(?<![\w-])--(?:no-)?([a-z][\w-]*)", node.value):
                    told = f"{path.name}, line {node.lineno}: there is no --{name}"
                    assert any(name in (option, option.partition(".")[0]) for option in known), told
