"""All figures of a report, with what is said under them."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from didicm.experiments.definition import Study
from didicm.report import curves, figures, study_figures
from didicm.report import images as gallery
from didicm.report.panel import Panel
from didicm.report.records import Row, settings_of
from didicm.report.style import plt
from didicm.report.verdict import contestants


@dataclass(frozen=True)
class Figure:
    """A figure of the report, as the bytes of its file."""

    name: str
    title: str
    caption: str
    data: bytes
    kind: str  # svg or png

    @property
    def uri(self) -> str:
        """The picture itself, for an img tag."""
        mime = "image/svg+xml" if self.kind == "svg" else "image/png"
        return f"data:{mime};base64,{base64.b64encode(self.data).decode()}"


CAPTIONS = {
    "columns": ("Accuracy over uncertainty", "As in the paper's first figure: the published numbers, and ours."),
    "study_gains": (
        "Gains over the standard classifier",
        "The published gains, and ours, paired by seed; where a bar crosses zero, noise may explain it all.",
    ),
    "study_calls": (
        "Network calls against accuracy",
        "Over probabilities (CP) one call a step; over labels (CL) one call a step and chain.",
    ),
    "steps": (
        "Solvers over their steps",
        "Every solver reads the same trained networks. The scale of NLL leaves out what is far worse.",
    ),
    "uncertainty": (
        "Over uncertainty",
        "Each method as its recipe reads it, from telling images to hardly telling ones. Bars: 95 % intervals "
        "over seeds.",
    ),
    "gains": (
        "Gains over the standard classifier",
        "Up is better. Differences paired by seed; where a bar crosses zero, noise may explain it all.",
    ),
    "calls": (
        "Network calls against quality",
        "One trained network, sampled with more or fewer steps; the star is read from a single call. Lines "
        "across: the standard classifiers, one call.",
    ),
    "reliability": (
        "Does it mean what it says?",
        "Below the diagonal a classifier is surer than it should be. In the hardest setting, as trained.",
    ),
    "risk": (
        "Answering only when sure",
        "If the least sure images are left to a person: errors among those that are answered. Lower is better.",
    ),
    "entropy": ("Entropy of right and wrong answers", "A useful posterior is unsure where it is wrong."),
    "trajectories": (
        "Posteriors on their way",
        "Test images as the network sees them in the hardest setting, from sure to unsure, with the five classes "
        "that end as the most probable; a tick marks the true one.",
    ),
    "mistakes": (
        "Where they err",
        "Images that at least one of the two gets wrong, with both posteriors, as trained: half of them where "
        "DiDiCM gives the true class least compared with the standard classifier, half where it gives it most.",
    ),
}


def draw_comparison(rows: Sequence[Row], out: Path) -> list[Figure]:
    """Figures of a comparison."""
    drawn = {
        "uncertainty": figures.over_uncertainty(rows),
        "gains": figures.gains(rows),
        "calls": figures.calls_against_quality(rows),
    }
    return [*_rendered(drawn), *_draw_hardest(rows, out)]


def draw_study(study: Study, ours: Panel, published: Panel | None, rows: Sequence[Row], out: Path) -> list[Figure]:
    """Figures of a study, and those of the hardest setting."""
    return [*draw_panels(study, ours, published, rows), *_draw_hardest(rows, out)]


def draw_panels(study: Study, ours: Panel, published: Panel | None, rows: Sequence[Row]) -> list[Figure]:
    """What the results file alone can show, the published numbers beside ours."""
    panels = [published, ours] if published else [ours]
    drawn: dict[str, plt.Figure | None] = {}
    if study.layout == "uncertainty":
        drawn["columns"] = study_figures.over_columns(
            panels, "top-5" if "top-5" in ours.lines[0].values else "top-1"
        )
        drawn["study_calls"] = study_figures.calls(rows, published) if study.curves else None
    if study.layout in ("uncertainty", "sizes"):
        drawn["study_gains"] = study_figures.gains(panels)
    if study.layout == "steps":
        drawn["steps"] = study_figures.over_steps(ours)
    if study.layout == "metrics":
        drawn["uncertainty"] = figures.over_uncertainty(rows)
    return _rendered(drawn)


def _draw_hardest(rows: Sequence[Row], out: Path) -> list[Figure]:
    """Curves and single images, of the hardest setting."""
    hard = settings_of(rows)[-1]
    raw, tempered = curves.load_stored(rows, hard, out), curves.load_stored(rows, hard, out, tempered=True)
    return _rendered(
        {
            "reliability": curves.reliability_diagrams(raw, hard),
            "risk": curves.risk_coverage_curves(tempered, hard),
            "entropy": curves.entropies(raw, hard),
            **_draw_images([row for row in rows if row.setting == hard and row.main], rows, out),
        }
    )


def _draw_images(hard: Sequence[Row], rows: Sequence[Row], out: Path) -> dict[str, plt.Figure | None]:
    """Single images of DiDiCM and of the first standard classifier, with the same seed."""
    ours, standard = contestants(rows)
    own = [row for row in hard if ours is not None and row.method == ours.method]
    if not own:
        return {}
    row = min(own, key=lambda row: row.seed)
    pictures = gallery.load_pictures(row, out)
    drawn = {"trajectories": gallery.trajectories(pictures)}
    rivals = [r for r in hard if standard and r.method == standard[0].method and r.seed == row.seed]
    if rivals:
        other = gallery.load_pictures(rivals[0], out)
        drawn["mistakes"] = gallery.mistakes(pictures, other, (row.method, rivals[0].method))
    return drawn


def _rendered(drawn: dict[str, plt.Figure | None]) -> list[Figure]:
    images = ("trajectories", "mistakes")
    return [_render(name, figure, "png" if name in images else "svg") for name, figure in drawn.items() if figure]


def _render(name: str, figure: plt.Figure, kind: str) -> Figure:
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else {"Software": None})
    plt.close(figure)
    return Figure(name, *CAPTIONS[name], file.getvalue(), kind)
