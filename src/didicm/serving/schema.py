"""What OpenAPI says of `POST /predict`, whose body has three forms."""

from typing import Any

_BASE64 = {"type": "string", "contentEncoding": "base64"}
_OPTIONS: dict[str, Any] = {
    "steps": {"type": "integer", "minimum": 1, "description": "Steps of the sampler; by default as stored."},
    "sampler": {"type": "string", "enum": ["cp", "cl", "readout"], "description": "By default as stored."},
    "top": {"type": "integer", "minimum": 1, "default": 5, "description": "Classes in the answer."},
    "classes": {
        "type": "array",
        "items": {"type": "string"},
        "description": "The classes that are possible here; the probabilities are renormalised to them.",
    },
    "prior": {
        "oneOf": [
            {"type": "object", "additionalProperties": {"type": "number", "exclusiveMinimum": 0}},
            {"type": "string", "enum": ["uniform", "training"]},
        ],
        "description": "How frequent each class is here; training undoes a balanced training.",
    },
    "taxonomy": {
        "type": "object",
        "additionalProperties": {"type": "array", "items": {"type": "string"}},
        "description": "Coarser names and their classes, whose probabilities are summed.",
    },
    "trajectory": {"type": "boolean", "default": False, "description": "Answer with every step too."},
    "baseline": {"type": "boolean", "default": False, "description": "Ask the baseline too."},
}
_PREDICTION: dict[str, Any] = {
    "type": "object",
    "description": "An image's answer, or the error of that image alone.",
    "properties": {
        "error": {"type": "string"},
        "classes": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "probability": {"type": "number"}},
            },
        },
        "entropy": {"type": "number", "description": "Of the posterior, in nats."},
        "conformal_set": {
            "type": ["array", "null"],
            "items": {"type": "string"},
            "description": "Classes that cover the truth at the calibrated rate; null if that does not apply.",
        },
        "conformal_claim": {
            "type": ["string", "null"],
            "description": "For how many images, of which classes, such sets hold the truth; null without one.",
        },
        "outlier_score": {
            "type": ["number", "null"],
            "description": "How unlike the training images it is: about 1 if it is not; null if unknown.",
        },
        "unlike_training": {
            "type": ["boolean", "null"],
            "description": "Whether it is too unlike them to rely on the probabilities; it then has no set.",
        },
        "trajectory": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "time": {"type": "number"},
                    "entropy": {"type": "number"},
                    "probabilities": {
                        "type": "array",
                        "items": {"type": "number"},
                        "description": "Of the classes above, in their order.",
                    },
                },
            },
        },
        "baseline": {"type": "object", "description": "The baseline's answer, in the same form."},
    },
}
_ANSWER = {
    "type": "object",
    "properties": {"model": {"type": "string"}, "predictions": {"type": "array", "items": _PREDICTION}},
}
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}}

PREDICT: dict[str, Any] = {
    "description": "Options may stand in the query as well: numbers, true or false, prior and taxonomy as JSON; "
    "classes repeated.",
    "parameters": [
        {"name": name, "in": "query", "required": False, "schema": _OPTIONS[name]}
        for name in ("steps", "sampler", "top", "classes", "trajectory", "baseline")
    ],
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"image": {"type": "string", "format": "binary"}, **_OPTIONS},
                }
            },
            "image/*": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"image": _BASE64, "images": {"type": "array", "items": _BASE64}, **_OPTIONS},
                }
            },
        },
    },
    "responses": {
        "200": {
            "description": "Answers in the order of the images.",
            "content": {"application/json": {"schema": _ANSWER}},
        },
        **{
            status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
            for status, text in {
                "400": "The body cannot be read.",
                "401": "The token is missing or wrong.",
                "408": "The request took too long to arrive.",
                "413": "The request is too large.",
                "422": "No image could be read, or an option is wrong.",
                "503": "Busy: Retry-After says when to come back.",
            }.items()
        },
    },
}
