import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from didicm.checkpoint import load
from didicm.errors import UserError
from didicm.experiments import execute as executing
from didicm.experiments import measure as measuring
from didicm.experiments.execute import execute, prepare, read_result, write_run
from didicm.experiments.results import RESULTS, TRIALS, Trial, append_result, read_plan, read_results, read_trials
from didicm.experiments.run import plan_runs, run_study
from didicm.experiments.spec import Condition
from didicm.experiments.tune import (
    LENGTHS,
    SEED,
    SPREADS,
    VERSION,
    at_most,
    choose,
    combine,
    cost_of_one_draw,
    next_length,
    next_stage,
    search_rounds,
    trials_of,
)
from didicm.training.state import keep
from didicm.values import override

TRIAL = Trial("a", "DiDiCM", Condition(7, 0.05), 0, {"epochs": 2}, 90, 10, 1.0, {"cls/NLL": 1.0}, {})


@pytest.fixture
def planned(tiny):
    """Runs of the study by key, as they are without a search."""
    return lambda *args, **changes: plan_runs(tiny(*args, **changes), None, None, None)[0]


@pytest.fixture(scope="module")
def searched(tiny, few_images, tmp_path_factory):
    """Folder of a study that was tuned without interruption."""
    out = tmp_path_factory.mktemp("searched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("didicm.data.sources.FASHION_MINI", few_images)
        run_study(tiny(tune=5, seeds=1), out)
    return out


def flat(count):
    return [factor for factors in search_rounds(count) for factor in factors]


def test_lengths_come_first_then_learning_rates_then_weight_decays_then_both_evenly_spread():
    *lengths, rates, decays, drawn = search_rounds(500)
    assert lengths == [[{}] * trials for trials in LENGTHS]
    for found, (name, most) in zip((rates, decays), SPREADS.items(), strict=True):
        assert found == [{name: 1 / most}, {name: most}]
    for name, most in SPREADS.items():
        logs = np.log([factor[name] for factor in drawn]) / math.log(most)
        assert (abs(logs) <= 1).all()
        assert np.histogram(logs, 8, (-1, 1))[0].min() > len(drawn) / 8 * 0.9
    assert all(set(factor) == set(SPREADS) for factor in drawn)


@pytest.mark.parametrize("best", [5, 10, 15, 20, 28, 40, 80, 160, 320])
def test_a_length_is_doubled_or_halved_for_as_long_as_that_helps(best):
    tried = {}
    for _ in range(sum(LENGTHS)):
        length = next_length(tried, 20)
        tried[length] = abs(math.log(length / best))
    assert list(tried)[:2] == [20, 40]
    assert min(tried.values()) <= math.log(2 if best in (5, 160, 320) else 1.5)
    if best >= 160:
        assert list(tried) == [20, 40, 80, 160]
    elif best > 5:  # on both sides of the best is another
        assert min(tried) < min(tried, key=tried.get) < max(tried)


def test_lengths_that_diverge_are_not_exceeded():
    assert next_length({20: 1.0, 40: math.inf}, 20) == 10
    assert next_length({20: math.inf, 40: math.inf}, 20) == 10
    assert next_length({20: math.inf, 40: math.inf, 10: math.inf}, 20) == 5
    assert next_length({20: 1.0, 40: math.inf, 10: 2.0}, 20) == 14


@pytest.mark.parametrize(("start", "best", "lengths"), [(3, 3, [3, 6, 2, 4]), (1, 1, [1, 2, 1, 1])])
def test_few_epochs_are_tried_once_each(start, best, lengths):
    """Halves of an epoch are rounded; where nothing is left to try, the best is named again."""
    tried, found = {}, []
    for _ in range(sum(LENGTHS)):
        found.append(next_length(tried, start))
        tried[found[-1]] = abs(math.log(found[-1] / best))
    assert found == lengths


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 6, 7, 8, 9, 20])
def test_more_trials_only_add_to_fewer(count):
    assert flat(count) == flat(30)[:count]


def test_every_round_starts_from_the_best_of_all_before(planned):
    """Held-out NLL is lowest at half the length, at the lower learning rate and at the higher weight decay."""
    runs, done = planned({"epochs": 40}), []
    aim = {"epochs": 0.5, "optimizer.lr": 0.4, "optimizer.weight_decay": 5.0}
    starts = {run.kind: {name: run.settings[name] for name in aim} for run in runs.values()}
    rounds = []
    while (stage := next_stage(runs, 9, done)) and next(iter(stage.values())).trial is not None:
        left = [trial for key, trial in stage.items() if key not in {t.key for t in done}]
        rounds.append(sorted({trial.trial for trial in left}))
        for trial in left:
            settings = {name: trial.settings[name] for name in aim}
            factors = {name: value / starts[trial.kind][name] for name, value in settings.items()}
            nll = sum(abs(math.log(factors[name] / best)) for name, best in aim.items())
            key, method = trial.key, str(trial.method)
            record = Trial(key, method, trial.condition, trial.trial, settings, 90, 10, 1.0, {"cls/NLL": nll}, {})
            done.append(record)
    assert rounds == [[0, 1], [2], [3], [4, 5], [6, 7], [8]]
    for run in stage.values():
        assert {name: run.settings[name] / starts[run.kind][name] for name in aim} == pytest.approx(aim, rel=0.01)


def test_every_method_has_the_same_trials_and_the_first_is_the_recipe(planned):
    runs = planned({"epochs": 40})
    trials = trials_of(runs, 6)
    assert len(trials) == 2 * 6
    for run in runs.values():
        own = [trial for trial in trials.values() if trial.method == run.method]
        assert [trial.trial for trial in own] == list(range(6))
        assert {**own[0].settings, "seed": 0} == {**run.settings, "seed": 0}
        assert [trial.config.epochs for trial in own[:4]] == [40, 80, 20, 57]  # as if the first were best
        assert all(trial.config.run.validate_epochs == trial.config.epochs for trial in own)
    by_method = {}
    for trial in trials.values():
        searched = trial.config.epochs, trial.config.optimizer.lr, trial.config.optimizer.weight_decay
        by_method.setdefault(str(trial.method), []).append(searched)
    assert len(set(map(tuple, by_method.values()))) == 1


def test_no_trial_has_a_seed_or_a_key_of_the_table_or_any_test_image(planned):
    runs = planned(seeds=20)
    trials = trials_of(runs, 5)
    assert not {trial.config.seed for trial in trials.values()} & {run.config.seed for run in runs.values()}
    assert not trials.keys() & runs.keys()
    trial = next(iter(trials.values()))
    components, test = prepare(trial)
    assert (len(components.train), len(components.val), len(test)) == (90, 10, 0)


def test_an_untuned_study_has_the_keys_that_it_always_had(planned):
    runs = planned({"draws_per_image": 2, "mask": 0, "augment.pad_mode": "black"})  # as recipe small once was
    assert next_stage(runs, 0, []) == runs
    assert next(iter(runs)) == "standard-didirn8_7px-0.05_none_seed0_efe3c5862f"


def test_what_two_methods_have_in_common_is_trained_once(planned):
    methods = [{"name": "short", "epochs": 20}, {"name": "long", "epochs": 40}]
    runs, done = planned(methods=methods), {}

    def search():
        while stage := next_stage(runs, 4, done.values()):
            for key, trial in stage.items():
                epochs = trial.config.epochs
                found = {"metrics": {"cls/NLL": abs(epochs - 20)}, "settings": {"epochs": epochs}}
                done[key] = replace(TRIAL, key=key, condition=trial.condition, **found)

    with pytest.raises(UserError, match="the search made short and long the same: leave one of them out"):
        search()
    assert sorted(trial.settings["epochs"] for trial in done.values()) == [10, 14, 20, 40, 80]


def test_lengths_of_snapshots_have_equal_cycles(planned):
    methods = [{"name": "several", "epochs": 12, "optimizer.snapshots": 4}]
    lengths = [trial.config.epochs for trial in trials_of(planned(methods=methods), 4).values()]
    assert lengths == [12, 24, 8, 16]
    methods = [{"name": "several", "epochs": 13, "optimizer.snapshots": 4}]
    start = next(iter(trials_of(planned(methods=methods), 4).values()))
    with pytest.raises(UserError, match="needs equal cycles"):  # as without a search
        prepare(start)


def test_an_ensemble_shares_the_trials_of_its_single_classifier(planned):
    methods = [{"name": "one", "members": 1}, {"name": "four", "members": 4}]
    runs = planned(methods=methods)
    trials = trials_of(runs, 2)
    assert [str(trial.method) for trial in trials.values()] == ["one"] * 2
    done = [
        replace(TRIAL, key=key, condition=trial.condition, number=i, metrics={"cls/NLL": -i})
        for i, (key, trial) in enumerate(trials.items())
    ]
    assert {(run.config.epochs, run.networks) for run in next_stage(runs, 2, done).values()} == {(4, 1), (4, 4)}


def test_the_lowest_held_out_nll_is_chosen_per_method_and_condition():
    other = Condition(14, 0.05)
    made = [(0, 1.5, TRIAL.condition), (1, 1.2, TRIAL.condition), (2, 1.2, TRIAL.condition), (0, 9.0, other)]
    trials = [replace(TRIAL, number=n, metrics={"cls/NLL": x}, condition=c) for n, x, c in made]
    lost = replace(TRIAL, number=3, metrics=None)
    best = choose([lost, *trials])
    assert {condition: trial.number for (_, condition), trial in best.items()} == {TRIAL.condition: 1, other: 0}
    assert choose([lost]) == {}


def with_losses(number, losses):
    return replace(TRIAL, number=number, metrics={"cls/NLL": float(np.mean(losses))}, losses=tuple(losses))


@pytest.mark.parametrize(("errors", "chosen"), [(1.8, 0), (2.2, 4)])
def test_a_rate_as_given_is_kept_unless_another_is_better_by_two_standard_errors(errors, chosen):
    rng = np.random.default_rng(0)
    given, gain = rng.exponential(2.0, 40), rng.normal(0, 0.1, 40)
    gain += (
        errors * gain.std(ddof=1) / math.sqrt(40) - gain.mean()
    )  # little beside the spread of the images' losses
    trials = [with_losses(0, given), with_losses(4, given - gain), with_losses(5, given + 0.1)]
    (best,) = choose(trials).values()
    assert best.number == chosen
    unknown = [replace(trial, losses=None) for trial in trials]  # as earlier versions stored and chose them
    assert choose(unknown).popitem()[1].number == 4
    lengths = [replace(trial, number=number) for number, trial in enumerate(trials)]
    assert choose(lengths).popitem()[1].number == 1  # the lowest, however little it is


def test_each_round_is_compared_with_what_was_kept_so_far():
    """A learning rate that is clearly better than the settings as given, but not than the length that was kept."""
    flat = np.full(10, 2.0)
    wave = np.tile([0.3, -0.3], 5)
    trials = [with_losses(0, flat), with_losses(1, flat - 0.5), with_losses(4, flat - 0.55 + wave)]
    assert choose(trials).popitem()[1].number == 1
    assert choose([trials[0], trials[2]]).popitem()[1].number == 4
    assert choose([replace(trials[0], metrics=None, losses=None), *trials[1:]]).popitem()[1].number == 1


def drawn(nlls_by_number, **changes):
    """Trials of one kind: for each number, the NLL by each draw of held-out images."""
    return [
        replace(TRIAL, number=number, repeat=repeat, metrics={"cls/NLL": nll}, losses=(nll,) * 10, **changes)
        for number, nlls in nlls_by_number.items()
        for repeat, nll in enumerate(nlls, 1)
    ]


def test_every_trial_is_repeated_with_other_images_held_out(planned):
    runs = planned()
    once, thrice = trials_of(runs, 4), trials_of(runs, 4, holdouts=3)
    assert once.keys() < thrice.keys()
    assert len(thrice) == 3 * len(once)
    kinds = {}
    for run in thrice.values():
        kinds.setdefault((run.kind, run.trial), []).append(run)
    for repeats in kinds.values():
        assert [(run.repeat, run.seed, run.config.seed) for run in repeats] == [
            (i + 1, SEED + i, SEED + i) for i in range(3)
        ]
        drawn = [prepare(run)[0].val for run in repeats]
        assert len({tuple(map(images.name, range(len(images)))) for images in drawn}) == 3
        settings = [{**run.settings, "seed": None} for run in repeats]
        assert settings[0] == settings[1] == settings[2]


def test_a_trial_is_judged_by_all_draws_of_its_held_out_images():
    trials = drawn({0: (1.0, 1.6, 1.6), 1: (1.3, 1.3, 1.3)})
    assert choose([trial for trial in trials if trial.repeat == 1]).popitem()[1].number == 0
    best = choose(reversed(trials)).popitem()[1]  # in whatever order they finished
    assert (best.number, best.num_held_out, best.losses) == (1, 30, (1.3,) * 30)
    assert best.nll == pytest.approx(1.3)


def test_a_trial_that_diverged_for_one_draw_is_not_chosen():
    trials = drawn({0: (1.0, 1.0), 1: (2.0, 2.0)})
    trials[1] = replace(trials[1], metrics=None, losses=None)
    assert choose(trials).popitem()[1].number == 1


def test_draws_are_compared_with_themselves_whatever_the_order_in_which_they_finished():
    """Draws differ by far more than rates do: only the same draw's losses may be subtracted."""
    trials = drawn({0: (1.0, 3.0), 4: (0.9, 2.9)})
    assert choose(trials).popitem()[1].number == 4
    assert choose([trials[1], trials[0], *trials[2:]]).popitem()[1].number == 4


def test_an_unfinished_trial_is_left_out():
    trials = drawn({0: (1.0, 1.2), 1: (0.5, 0.7)})[:3]
    assert [(trial.number, trial.nll) for trial in combine(trials)] == [(0, pytest.approx(1.1))]
    assert combine([]) == []


def test_what_a_single_draw_costs_is_judged_by_one_that_had_no_say():
    trials = drawn({0: (1.0, 2.0, 2.0), 1: (1.5, 1.0, 1.1)})  # draw 1 misleads, alone
    single = np.mean([1.5, 1.5, 2.0, 1.0, 2.0, 1.1])
    together = np.mean([1.5, 1.0, 1.1])
    assert cost_of_one_draw(trials) == pytest.approx(single - together)
    assert cost_of_one_draw([trial for trial in trials if trial.repeat < 3]) is None
    unfinished = drawn({0: (9.0,)}, condition=Condition(14, 0.05))
    diverged = [
        replace(trial, metrics=None, losses=None) if trial.repeat == 2 else trial
        for trial in drawn({1: (0.1,) * 3}, condition=Condition(14, 0.05))
    ]
    later = drawn({2: (0.1, 0.1, 0.1), 4: (0.1, 0.1, 0.1)})  # such trials follow from what all draws chose
    assert cost_of_one_draw([*trials, *unfinished, *diverged, *later]) == cost_of_one_draw(trials)


def test_one_held_out_image_chooses_no_rate():
    assert choose([with_losses(0, [2.0]), with_losses(4, [1.0])]).popitem()[1].number == 0


def test_many_losses_are_stored_by_group(planned, monkeypatch):
    monkeypatch.setattr(measuring, "LOSSES", 4)
    run = next(iter(trials_of(planned(), 1).values()))
    components, _ = prepare(run)
    probs, labels = torch.rand(10, 10, generator=torch.Generator().manual_seed(0)), torch.arange(10)
    trial = measuring.trial_of(run, components, 1.0, probs / probs.sum(1, keepdim=True), labels)
    assert len(trial.losses) == 4
    assert np.average(trial.losses, weights=[3, 3, 2, 2]) == pytest.approx(trial.nll, abs=1e-4)


def test_a_method_whose_trials_all_diverged_ends_the_study_with_advice(planned):
    runs = planned()
    done = [replace(TRIAL, key=key, metrics=None) for key in trials_of(runs, 1)]
    with pytest.raises(UserError, match=r"all trials of standard, 7 px, .*, have diverged: start from a lower"):
        next_stage(runs, 1, done)


def test_the_seeds_are_trained_with_what_the_search_chose(tiny, planned, searched):
    trials = read_trials(searched)
    assert [trial.number for trial in trials] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert all((trial.num_train, trial.num_held_out) == (90, 10) for trial in trials)
    plan, results = read_plan(searched), read_results(searched)
    best = choose(trials)
    runs = planned(seeds=1)
    for run, result in zip(runs.values(), results, strict=True):
        chosen = best[str(run.method), run.condition]
        assert len(chosen.losses) == 10
        assert np.mean(chosen.losses) == pytest.approx(chosen.nll, abs=1e-4)
        expected = replace(run, config=override(run.config, chosen.settings))
        assert (result.key, result.seed) == (expected.key, 0)
        assert plan.runs[result.key] == result.method == str(run.method)
    assert not {trial.key for trial in trials} & {result.key for result in results}
    assert len(list((searched / "measured").iterdir())) == len(results)  # trials leave nothing to look at


def test_a_finished_search_is_not_run_again_and_more_seeds_use_it(tiny, searched):
    before = (searched / TRIALS).read_bytes(), (searched / RESULTS).read_bytes()
    first = run_study(tiny(tune=5, seeds=1), searched)
    assert ((searched / TRIALS).read_bytes(), (searched / RESULTS).read_bytes()) == before
    assert len(first) == 2


@pytest.mark.usefixtures("few_tested")
def test_an_interrupted_search_goes_on_and_chooses_the_same(tiny, searched, tmp_path):
    trials = read_trials(searched)
    study = tiny(tune=5, seeds=1)
    for trial in trials[:3]:  # of the four in the first round
        append_result(tmp_path, trial)
    (tmp_path / "study.json").write_bytes((searched / "study.json").read_bytes())
    console = Console(record=True)
    run_study(study, tmp_path, console=console)
    shown = console.export_text()
    assert "10 trials, 3 of them done before" in shown  # all rounds count from the start
    assert [f"search {n}/10 " in shown for n in range(3, 11)] == [False] + 7 * [True]
    assert [(t.key, t.metrics) for t in read_trials(tmp_path)] == [(t.key, t.metrics) for t in trials]
    assert [r.key for r in read_results(tmp_path)] == [r.key for r in read_results(searched)]


@pytest.mark.usefixtures("few_tested")
def test_a_study_with_several_hold_outs_trains_with_what_all_of_them_chose(tiny, tmp_path):
    study = tiny(tune=2, seeds=1, holdouts=2)
    console = Console(record=True, width=200)
    results = run_study(study, tmp_path, console=console)
    trials = read_trials(tmp_path)
    assert len(trials) == 2 * len(combine(trials)) == 2 * 2 * len(study.methods)
    assert "trial 1, draw 2: held-out NLL" in console.export_text()
    best = choose(trials)
    for result in results:
        chosen = best[result.method, result.condition]
        config = next(r for r in plan_runs(study, None, None, None)[0].values() if str(r.method) == result.method)
        assert result.key == replace(config, config=override(config.config, chosen.settings)).key
    with pytest.raises(UserError, match=r"other settings \(holdouts is 2, not 1\)"):
        run_study(tiny(tune=2, seeds=1), tmp_path)


def test_a_forecast_of_the_most_doubles_every_length(planned):
    runs = planned({"epochs": 40})
    most = at_most(runs, 8)
    trials = [run for run in most.values() if run.trial is not None]
    for method in {str(run.method) for run in runs.values()}:
        own = [trial.config.epochs for trial in trials if str(trial.method) == method]
        assert own == [40, 80, 160, 320] + 4 * [320]
    assert {run.config.epochs for run in most.values() if run.trial is None} == {320}
    assert len(most) == len(trials) + len(runs)


def test_hold_outs_are_not_drawn_anew_where_a_seed_keeps_them(tiny, tmp_path):
    with pytest.raises(UserError, match="--holdouts draws held-out images anew, which data_seed keeps"):
        run_study(tiny(tune=2, holdouts=2), tmp_path / "study", settings={"data_seed": 0})
    assert not (tmp_path / "study").exists()


def test_hold_outs_need_a_search(tiny, tmp_path):
    with pytest.raises(UserError, match="--holdouts repeats the trials of a search: give --tune too"):
        run_study(tiny(holdouts=2), tmp_path)


def test_a_folder_keeps_to_one_search(tiny, searched):
    for study in (tiny(seeds=1), tiny(tune=2, seeds=1)):
        with pytest.raises(UserError, match=rf"other settings \(tune is 5, not {study.tune}\)"):
            run_study(study, searched)


def test_a_search_of_an_earlier_version_is_not_mixed_with_one_of_this(tiny, searched, tmp_path):
    study = json.loads((searched / "study.json").read_text())
    assert study.pop("search") == VERSION
    (tmp_path / TRIALS).write_bytes((searched / TRIALS).read_bytes())
    for earlier in ({}, {"rounds": False}, {"rounds": True}):
        (tmp_path / "study.json").write_text(json.dumps({**study, **earlier}))
        with pytest.raises(UserError, match="its search is of an earlier version"):
            run_study(tiny(tune=5, seeds=1), tmp_path)


def test_a_trial_does_not_depend_on_test_images(tmp_path, planned):
    generator = np.random.default_rng(0)
    for split, name, count in (("train", "a", 20), ("train", "b", 20), ("val", "a", 4), ("val", "b", 4)):
        place = tmp_path / "images" / split / name
        place.mkdir(parents=True)
        for i in range(count):
            Image.fromarray(generator.integers(0, 256, (8, 8), dtype=np.uint8)).save(place / f"{i}.png")

    def try_out(place):
        settings = {"data": str(tmp_path / "images"), "batch_size": 4, "fraction": 1.0, "epochs": 1}
        runs = {key: replace(run, config=override(run.config, settings)) for key, run in planned(seeds=1).items()}
        trial = list(trials_of(runs, 1).values())[1]
        folder = write_run(tmp_path / place, tmp_path / place, trial)
        execute(folder)
        return read_result(folder)

    first = try_out("first")
    for path in (tmp_path / "images" / "val").rglob("*.png"):
        path.write_bytes(b"nothing that could be measured")
    assert try_out("second").metrics == first.metrics


def test_a_trial_that_diverges_is_a_result_and_is_not_chosen(tmp_path, planned):
    runs = planned({"optimizer.clip": None, "optimizer.name": "sgd"}, seeds=1)
    run = next(iter(trials_of(runs, 1).values()))
    run = replace(run, config=override(run.config, {"optimizer.lr": 1000.0, "epochs": 30}))
    folder = write_run(tmp_path, tmp_path, run)
    execute(folder)
    trial = read_result(folder)
    assert (trial.metrics, trial.nll) == (None, math.inf)
    append_result(tmp_path, trial)
    assert read_trials(tmp_path) == [trial]
    assert read_results(tmp_path) == []


def test_a_trial_whose_network_answers_with_no_numbers_has_diverged_too(tmp_path, planned, monkeypatch):
    run = next(iter(trials_of(planned(seeds=1), 1).values()))
    folder = write_run(tmp_path, tmp_path, run)
    real = executing.measure

    def measure(run, components, *args):  # as after a step that was far too long
        place = Path(run.config.out) / "last"
        classifier = load(place).classifier
        for weights in classifier.parameters():
            weights.data *= 1e30
        keep(components, classifier, place)
        return real(run, components, *args)

    monkeypatch.setattr(executing, "measure", measure)
    execute(folder)
    assert read_result(folder).metrics is None


@pytest.mark.parametrize("damage", ["nonsense", "{}", json.dumps({**TRIAL.to_dict(), "number": -1})])
def test_a_damaged_trial_is_named_with_its_remedy(tmp_path, damage):
    append_result(tmp_path, TRIAL)
    assert read_trials(tmp_path) == [TRIAL]
    with open(tmp_path / TRIALS, "a") as file:
        file.write(f"{damage}\n")
    with pytest.raises(UserError, match=r"line 2 of .*trials.jsonl is damaged \(.+\): delete that line"):
        read_trials(tmp_path)


def test_a_search_needs_held_out_images(tiny):
    with pytest.raises(UserError, match="tune needs held-out images to judge by: set held_out above 0"):
        tiny(tune=4, held_out=0)


def test_the_seed_of_the_search_is_no_seed_of_a_run(tiny):
    with pytest.raises(UserError, match="seeds must be at most 1000"):
        tiny(seeds=SEED + 1)
