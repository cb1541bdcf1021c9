"""What OpenAPI says of `POST /predict`, whose body has three forms."""

from typing import Any

Schema = dict[str, Any]


def _of(kind: str | list[str], text: str = "", **more: Any) -> Schema:
    return {"type": kind, **more, **({"description": text} if text else {})}


def _list(items: Schema, text: str = "", *, nullable: bool = False) -> Schema:
    return _of(["array", "null"] if nullable else "array", text, items=items)


def _object(text: str = "", /, **properties: Schema) -> Schema:
    return _of("object", text, properties=properties)


def _body(kind: str, schema: Schema) -> Schema:
    return {kind: {"schema": schema}}


_STRING, _NUMBER = _of("string"), _of("number")
_BASE64, _BINARY = _of("string", contentEncoding="base64"), _of("string", format="binary")
_OPTIONS: dict[str, Schema] = {
    "steps": _of("integer", "Steps of the sampler; by default as stored.", minimum=1),
    "sampler": _of("string", "By default as stored.", enum=["cp", "cl", "readout"]),
    "top": _of("integer", "Classes in the answer.", minimum=1, default=5),
    "classes": _list(_STRING, "The classes that are possible here; the probabilities are renormalised to them."),
    "prior": {
        "oneOf": [
            _of("object", additionalProperties=_of("number", exclusiveMinimum=0)),
            _of("string", enum=["uniform", "training"]),
        ],
        "description": "How frequent each class is here; training undoes a balanced training.",
    },
    "taxonomy": _of(
        "object",
        "Coarser names and their classes, whose probabilities are summed.",
        additionalProperties=_list(_STRING),
    ),
    "trajectory": _of("boolean", "Answer with every step too.", default=False),
    "baseline": _of("boolean", "Ask the baseline too.", default=False),
}
_STEP = _object(
    time=_NUMBER,
    entropy=_NUMBER,
    probabilities=_list(_NUMBER, "Of the classes above, in their order."),
)
_PREDICTION = _object(
    "An image's answer, or the error of that image alone.",
    error=_STRING,
    classes=_list(_object(name=_STRING, probability=_NUMBER)),
    entropy=_of("number", "Of the posterior, in nats."),
    conformal_set=_list(
        _STRING, "Classes that cover the truth at the calibrated rate; null if that does not apply.", nullable=True
    ),
    conformal_claim=_of(
        ["string", "null"], "For how many images, of which classes, such sets hold the truth; null without one."
    ),
    outlier_score=_of(
        ["number", "null"], "How unlike the training images it is: about 1 if it is not; null if unknown."
    ),
    unlike_training=_of(
        ["boolean", "null"], "Whether it is too unlike them to rely on the probabilities; it then has no set."
    ),
    trajectory=_list(_STEP),
    baseline=_of("object", "The baseline's answer, in the same form."),
)
_REFUSALS = {
    "400": "The body cannot be read.",
    "401": "The token is missing or wrong.",
    "408": "The request took too long to arrive.",
    "413": "The request is too large.",
    "422": "No image could be read, or an option is wrong.",
    "503": "Busy: Retry-After says when to come back.",
}

PREDICT: Schema = {
    "description": "Options may stand in the query as well: numbers, true or false, prior and taxonomy as JSON; "
    "classes repeated.",
    "parameters": [
        {"name": name, "in": "query", "required": False, "schema": _OPTIONS[name]}
        for name in ("steps", "sampler", "top", "classes", "trajectory", "baseline")
    ],
    "requestBody": {
        "required": True,
        "content": {
            **_body("multipart/form-data", _object(image=_BINARY, **_OPTIONS)),
            **_body("image/*", _BINARY),
            **_body("application/json", _object(image=_BASE64, images=_list(_BASE64), **_OPTIONS)),
        },
    },
    "responses": {
        "200": {
            "description": "Answers in the order of the images.",
            "content": _body("application/json", _object(model=_STRING, predictions=_list(_PREDICTION))),
        },
        **{
            status: {"description": text, "content": _body("application/json", _object(error=_STRING))}
            for status, text in _REFUSALS.items()
        },
    },
}
