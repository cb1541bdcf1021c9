"""Real image files for the tests."""

import io

import pytest


@pytest.fixture(scope="session")
def png_bytes(picture):
    """The bytes of a PNG file."""

    def make(seed):
        file = io.BytesIO()
        picture(seed).save(file, "PNG")
        return file.getvalue()

    return make
