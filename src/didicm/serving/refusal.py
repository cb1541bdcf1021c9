"""Requests that are not served: a status, one sentence, and perhaps when to come back."""

from fastapi.responses import JSONResponse

RETRY_SECONDS = 1


class RefusalError(Exception):
    """An answer other than success, to be sent as it is."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> JSONResponse:
        """As JSON."""
        return JSONResponse({"error": self.message}, self.status, self.headers)


def busy() -> RefusalError:
    """The server has more to do than it takes on."""
    return RefusalError(503, "the server is busy: try again soon", Retry_After=str(RETRY_SECONDS))
