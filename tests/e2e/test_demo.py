from didicm.cli import demo
from didicm.errors import UserError
from didicm.experiments.run import executor_of, plan_runs


def test_the_demo_ends_with_table_verdict_report_and_next_commands(tmp_path, monkeypatch, works, unrendered):
    monkeypatch.setattr(demo, "LEVELS", dict.fromkeys(list(demo.LEVELS)[-1:], 1))
    monkeypatch.setattr(demo, "usable_cores", lambda: 1)
    shown = works("demo", "--out", tmp_path / "demo", "--seeds", 1).out
    for words in ("3/3", "Test images", "network call of DiDiCM costs", "report.html", demo.NEXT):
        assert words in shown
    assert (tmp_path / "demo" / "report.html").exists()


def test_a_machine_with_one_gpu_can_run_it_on_all_its_cores(monkeypatch, tmp_path, fails):
    def check(study, out, *, data, jobs, console, **_):
        executor_of(plan_runs(study, data)[0], out, "local", jobs, {}, console)
        raise UserError(f"{jobs} at a time")

    monkeypatch.setattr(demo, "run_study", check)
    monkeypatch.setattr(demo, "usable_cores", lambda: 8)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert "4 at a time" in fails("demo", f"--out={tmp_path}")


def test_mistakes_are_one_sentence(fails):
    assert "--seeds must be at least 1" in fails("demo", "--seeds=0")
