import io
import os
import tarfile
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from didicm.data import DataError
from didicm.data.listing import ImageFile, list_images, write_listing


def names(*sources, lines=()):
    return [image.name for image in list_images([str(source) for source in sources], lines)]


@pytest.fixture
def shard(tmp_path, png_bytes):
    """A tar file of three images among other members, without labels."""
    with tarfile.open(tmp_path / "shard-0.tar", "w") as tar:
        for name, content in [(f"x/{i}.png", png_bytes(i)) for i in range(3)] + [
            ("x/0.txt", b"a"),
            (".x.png", b""),
        ]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return tmp_path / "shard-0.tar"


def test_files_folders_and_patterns_in_the_order_of_their_names(tmp_path, write):
    for name in ("b/2.png", "b/10.JPG", "a.png", "b/sub/0.png", "b/.hidden.png", "b/.git/x.png"):
        write(tmp_path / name)
    (tmp_path / "b" / "notes.txt").write_text("no image")
    inside = [str(tmp_path / "b" / name) for name in ("10.JPG", "2.png", "sub/0.png")]
    assert names(tmp_path / "b") == inside
    assert names(tmp_path) == [str(tmp_path / "a.png"), *inside]
    assert names(tmp_path / "b" / "*.png", tmp_path / "a.png") == [inside[1], str(tmp_path / "a.png")]
    assert names(tmp_path / "**" / "0.png") == [inside[2]]
    write(tmp_path / "c.tar" / "0.png")  # a folder, whatever it is called
    assert names(tmp_path / "c.tar") == [str(tmp_path / "c.tar" / "0.png")]
    assert names(tmp_path / "{a,b/2}.png") == [str(tmp_path / "a.png"), inside[1]]
    (tmp_path / "b" / "up").symlink_to(tmp_path / "b")  # never round in circles
    assert names(tmp_path / "b") == inside


def test_a_name_with_signs_of_a_pattern_is_a_name_if_there_is_such_a_file(tmp_path, write):
    odd = [write(tmp_path / name) for name in ("x[1].png", "x{2}.png", "x*.png")]
    assert names(*odd) == [str(path) for path in odd]


def test_a_list_names_one_source_per_line_as_it_is(tmp_path, write, shard):
    write(tmp_path / "folder" / "0.png")
    lines = [b"%s\n" % os.fsencode(path) for path in (tmp_path / "folder", shard)]
    lines += [b"\n", b"gone[1].png\r\n", b"odd-\xff.png"]
    members = [f"{shard}:x/{i}.png" for i in range(3)]
    expected = [
        str(tmp_path / "folder" / "0.png"),
        *members,
        "gone[1].png",
        "odd-�.png",
        str(tmp_path / "last.png"),
    ]
    write(tmp_path / "last.png")
    assert names("-", tmp_path / "last.png", lines=lines) == expected
    (tmp_path / "empty").mkdir()
    (image,) = list_images([str(tmp_path / "empty")])
    assert image == ImageFile(str(tmp_path / "empty"))
    with pytest.raises(DataError, match="the folder holds no images"):
        image.open()


@pytest.mark.parametrize("form", ["struct", "binary"])
def test_shards_and_parquet_files_are_read_where_they_lie(form, tmp_path, picture, png_bytes, shard):
    cells = [png_bytes(i) for i in range(3, 8)]
    column = [{"bytes": cell, "path": None} for cell in cells] if form == "struct" else cells
    pq.write_table(pa.table({"id": list(range(5)), "photo": column}), tmp_path / "x.parquet", row_group_size=2)
    found = list(list_images([f"wds://{tmp_path}/shard-{{0..0}}.tar", f"hf://{tmp_path / 'x.parquet'}"]))
    assert [image.name for image in found[2:5]] == [
        f"{shard}:x/2.png", f"{tmp_path}/x.parquet[0]", f"{tmp_path}/x.parquet[1]",
    ]  # fmt: skip
    for seed, image in enumerate(found):
        assert image.open().convert("RGB").tobytes() == picture(seed).tobytes()


def test_what_names_no_images_is_told_in_a_sentence(tmp_path):
    (tmp_path / "torn.tar").write_bytes(b"torn" * 500)
    (tmp_path / "torn.parquet").write_bytes(b"torn")
    pq.write_table(pa.table({"id": [1]}), tmp_path / "numbers.parquet")
    for name, says in {
        "*.png": r"\*.png matches no files; check the pattern",
        "torn.tar": "torn.tar cannot be read as an uncompressed tar file",
        "torn.parquet": "torn.parquet cannot be read as parquet",
        "numbers.parquet": "numbers.parquet has no column 'image', only id",
    }.items():
        with pytest.raises(DataError, match=says):
            names(tmp_path / name)


def test_a_listing_is_read_part_by_part(tmp_path, shard):
    images = [ImageFile("a.png"), *list_images([str(shard)]), ImageFile(os.fsdecode(b"odd-\xff\n.png"))]
    listing = write_listing(tmp_path / "list", images, part_size=2)
    assert (listing.count, listing.parts) == (5, range(3))
    assert [listing.part(k) for k in (2, 0, 1)] == [images[4:], images[:2], images[2:4]]
    assert [listing.part_length(k) for k in listing.parts] == [2, 2, 1]
    assert write_listing(tmp_path / "again", images, part_size=2).digest == listing.digest
    assert write_listing(tmp_path / "other", images[::-1], part_size=2).digest != listing.digest
    assert write_listing(tmp_path / "none", [], part_size=2).parts == range(0)


def test_listing_many_takes_no_memory(tmp_path):
    def peak(count):
        tracemalloc.start()
        write_listing(
            tmp_path / "list", list_images(["-"], (b"%d.png\n" % i for i in range(count))), part_size=100
        )
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    peak(100)
    assert peak(20_000) < peak(1_000) + 50_000
