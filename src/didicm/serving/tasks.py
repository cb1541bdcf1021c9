"""Label Studio's tasks: where the images are, and how its interface wants the choices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from didicm.serving.security import Limits, RefusalError

# What a labelling interface may have: enough for thousands of choices, and read in an instant.
INTERFACE_BYTES, ELEMENTS, DEPTH = 100_000, 5_000, 50


@dataclass(frozen=True)
class Interface:
    """What of a labelling interface counts for us."""

    choices: str  # the name of the choices
    image: str  # the name of the image
    key: str  # of the image's address in a task
    allowed: frozenset[str]  # the choices it offers; empty: any


@dataclass(frozen=True)
class Tasks:
    """A request of Label Studio's."""

    interface: Interface
    addresses: list[Any]  # of the images; what is no text has none


def read_tasks(content: Mapping[str, Any], limits: Limits) -> Tasks:
    """The tasks of a JSON body."""
    tasks = content.get("tasks")
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise RefusalError(400, "tasks must be a list of objects")
    if len(tasks) > limits.images:
        raise RefusalError(400, f"at most {limits.images} tasks are allowed, got {len(tasks)}")
    interface = read_interface(content.get("label_config"))
    addresses = [data.get(interface.key) if isinstance(data := task.get("data"), dict) else None for task in tasks]
    return Tasks(interface, addresses)


def read_interface(config: Any) -> Interface:
    """The image of a labelling interface and the choices for it."""
    if not isinstance(config, str):
        raise RefusalError(400, "the labelling interface is missing")
    if len(config.encode()) > INTERFACE_BYTES:
        raise RefusalError(413, f"the labelling interface is larger than {INTERFACE_BYTES:,} bytes")
    try:
        root = ElementTree.fromstring(config, ElementTree.XMLParser(target=_BoundedBuilder()))
    except (ElementTree.ParseError, ValueError) as error:  # ValueError: characters that expat does not take
        raise RefusalError(400, "the labelling interface is not valid XML") from error
    images = {item.get("name", ""): item.get("value", "") for item in root.iter("Image")}
    for choices in root.iter("Choices"):
        image = choices.get("toName", "")
        if choices.get("name") and images.get(image, "").startswith("$"):
            offered = frozenset(choice.get("value", "") for choice in choices.iter("Choice"))
            return Interface(choices.get("name", ""), image, images[image].removeprefix("$"), offered)
    raise RefusalError(400, "the labelling interface needs Choices for an Image: <Choices name=... toName=...>")


class _BoundedBuilder(ElementTree.TreeBuilder):
    """Stops at too many elements, too deep ones, and a document type, which could define entities."""

    count = depth = 0

    def doctype(self, *_: str | None) -> None:
        raise RefusalError(400, "the labelling interface must not have a document type")

    def start(self, tag: str, attrs: dict[Any, Any], /) -> ElementTree.Element:
        self.count += 1
        self.depth += 1
        if self.count > ELEMENTS or self.depth > DEPTH:
            raise RefusalError(
                400,
                f"the labelling interface has more than {ELEMENTS:,} elements or is nested more than {DEPTH} deep",
            )
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> ElementTree.Element:
        self.depth -= 1
        return super().end(tag)
