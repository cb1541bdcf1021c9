from didicm.cli import demo


def test_the_demo_ends_with_table_verdict_report_and_next_commands(tmp_path, monkeypatch, works, unrendered):
    monkeypatch.setattr(demo, "LEVELS", dict.fromkeys(list(demo.LEVELS)[-1:], 1))
    monkeypatch.setattr(demo, "usable_cores", lambda: 1)
    shown = works("demo", "--out", tmp_path / "demo", "--seeds", 1).out
    for words in ("3/3", "Test images", "network calls of DiDiCM cost", "report.html", demo.NEXT):
        assert words in shown
    assert (tmp_path / "demo" / "report.html").exists()


def test_mistakes_are_one_sentence(fails):
    assert "--seeds must be at least 1" in fails("demo", "--seeds=0")
