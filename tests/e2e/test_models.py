from didicm.cli.__main__ import main as run_cli
from didicm.models import list_models


def test_models_lists_every_network_with_its_cost(capsys):
    assert run_cli(["models", "--size", "64"]) == 0
    printed = capsys.readouterr().out
    for name in list_models():
        assert name in printed
    assert "12.1 M" in printed
    assert "0.149 G" in printed
