"""What we ask of the image; `.ci/extras` carries out its steps without Docker."""

import fnmatch
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stages():
    """Instructions of each stage, as (name, arguments), in order."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = [[]]
    for line in lines:
        name, _, arguments = line.partition(" ")
        if name == "FROM":
            found.append([])
        found[-1].append((name, arguments))
    return found


def of(stage, wanted):
    return [arguments for name, arguments in stage if name == wanted]


def test_every_instruction_is_one_that_we_use(stages):
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for stage in stages for name, _ in stage} <= known
    assert len(stages) == 3  # what holds for both, the build, the image


def test_base_images_are_slim_and_of_a_version(stages):
    version = dict(argument.split("=") for argument in of(stages[0], "ARG"))["PYTHON"]
    assert re.fullmatch(r"3\.\d+", version)
    for stage in stages[1:]:
        assert re.fullmatch(r"python:\$\{PYTHON\}-slim( AS \w+)?", of(stage, "FROM")[0])


def test_the_image_has_the_wheel_and_nothing_of_the_source(stages):
    build, image = stages[1:]
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for sources in of(build, "COPY"):
        for source in sources.split()[:-1]:
            assert (ROOT / source).exists()
            assert any(fnmatch.fnmatch(f"!{source}", pattern) for pattern in ignored), source
    assert "pip wheel" in of(build, "RUN")[0]
    assert of(image, "COPY") == ["--from=build /dist /dist"]
    extras = dict(argument.split("=") for argument in of(image, "ARG"))["EXTRAS"].split(",")
    defined = dict(re.findall(r"^(\w+) = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for extra in extras:
        assert not any(name.startswith(("didicm", "torch")) for name in json.loads(defined[extra]))


def test_it_runs_without_root_under_an_init_process(stages):
    image = stages[2]
    names = [name for name, _ in image]
    assert int(of(image, "USER")[-1]) > 0
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    assert f"--uid {of(image, 'USER')[-1]}" in of(image, "RUN")[-1]
    entry, command = json.loads(of(image, "ENTRYPOINT")[0]), json.loads(of(image, "CMD")[0])
    assert entry == ["tini", "--", "didicm"]
    assert command[0] == "serve"
    assert command[command.index("--port") + 1] == of(image, "EXPOSE")[0]
    installed = next(run for run in of(image, "RUN") if "apt-get" in run)
    assert "--no-install-recommends tini" in installed
    assert "rm -rf /var/lib/apt/lists/*" in installed
    assert not any(
        re.search("token|secret|password", x, re.IGNORECASE) for kind in ("ENV", "ARG") for x in of(image, kind)
    )


def test_the_health_check_is_python_that_asks_the_server(stages):
    image = stages[2]
    options, _, command = of(image, "HEALTHCHECK")[0].partition(" CMD ")
    assert {"--interval", "--timeout", "--start-period", "--retries"} == set(re.findall(r"--[\w-]+", options))
    program, flag, code = json.loads(command)
    assert (program, flag) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    assert f"127.0.0.1:{of(image, 'EXPOSE')[0]}/health" in code
