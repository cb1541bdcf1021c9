"""Counts of what the server does, as Prometheus reads them."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Histogram:
    """How often values fell below each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> Iterator[str]:
        """In Prometheus's words, where the buckets are cumulative."""
        total = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """All counts of one server; safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._images: Counter[str] = Counter()
        self._seconds, self._batches = Histogram(SECONDS), Histogram(SIZES)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        with self._lock:
            self._requests[path, status] += 1
            self._seconds.add(seconds)

    def images(self, predicted: int, refused: int) -> None:
        """Count the images of a request."""
        with self._lock:
            self._images["predicted"] += predicted
            self._images["refused"] += refused

    def batch(self, size: int) -> None:
        """Count a batch that the model was asked about."""
        with self._lock:
            self._batches.add(size)

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """The exposition format; `gauges` are values of this moment, with their help, by name."""
        with self._lock:
            lines = [*_head("requests_total", "counter", "requests by path and status")]
            for (path, status), count in sorted(self._requests.items()):
                lines.append(f'didicm_requests_total{{path="{path}",status="{status}"}} {count}')
            lines += _head("images_total", "counter", "images by outcome")
            lines += [f'didicm_images_total{{outcome="{name}"}} {n}' for name, n in sorted(self._images.items())]
            lines += _head("request_seconds", "histogram", "time from a request's head to the end of its answer")
            lines += self._seconds.lines("didicm_request_seconds")
            lines += _head("batch_images", "histogram", "images that the model was asked about together")
            lines += self._batches.lines("didicm_batch_images")
        for name, (text, value) in gauges.items():
            lines += [*_head(name, "gauge", text), f"didicm_{name} {value:g}"]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP didicm_{name} {text}"
    yield f"# TYPE didicm_{name} {kind}"
