"""Tests of the GGUF reader: it reads what the standard writer writes, and every damaged file gives one clear error.

About 20 seconds, most of them for the fuzzing.
"""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_ggml.drafts.dflash.file import DraftFile
from dflash_ggml.errors import ModelFileError
from dflash_ggml.files import gguf
from dflash_ggml.files.gguf import GGUFFile, part_names
from dflash_ggml.models.qwen35 import Qwen35
from dflash_ggml.text.tokenizer import Tokenizer
from reference import tiny_models
from reference.gguf_bytes import Builder, Tensor, build, f32_tensor

KEYS = {
    "general.architecture": "test",
    "n": 3,
    "x": 0.5,
    "flag": True,
    "ids": [1, -2, 3],
    "words": ["a", "", "ü"],
}
TENSORS = [f32_tensor("a", (4, 3), 1.0), f32_tensor("b", (5,), 2.0), Tensor("c", 8, (32, 2), bytes(68))]


def small(**changes: object) -> Builder:
    """A file with every kind of value and three tensors."""
    return build(KEYS | changes, TENSORS)


def opened(path: Path, data: bytes) -> GGUFFile:
    path.write_bytes(data)
    return GGUFFile(path)


def patched(builder: Builder, label: str, value: int) -> bytes:
    """The file with the first field called `label` set to `value`."""
    field = next(f for f in builder.fields if f.label == label)
    data = bytearray(builder.data)
    data[field.offset : field.offset + field.size] = value.to_bytes(field.size, "little")
    return bytes(data)


# --- good files ---


def test_values_and_tensors_of_the_standard_writer(tmp_path: Path):
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "test")
    scalars = {"u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31)}
    scalars |= {"u64": 2**64 - 1, "i64": -(2**63)}
    for name, value in scalars.items():
        kind = {"u": "UINT", "i": "INT"}[name[0]] + name[1:]
        writer.add_key_value(name, value, GGUFValueType[kind])
    writer.add_float32("f32", 1.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve\n")
    writer.add_array("ints", [3, -1])
    writer.add_array("floats", [0.5, 2.0])
    writer.add_array("flags", [True, False])
    writer.add_array("words", ["", "ä", "z"])
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    halves = np.arange(6, dtype=np.float16).reshape(1, 2, 3)
    writer.add_tensor("weights", weights)
    writer.add_tensor("halves", halves)
    writer.add_tensor("q", np.zeros((2, 34), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as file:
        assert file.arch == "test" and file.version == 3
        for name, value in scalars.items():
            assert file.require(name, int) == value
        assert (file.require("f32", float), file.require("f64", float)) == (1.5, 0.1)
        assert file.require("yes", bool) is True and file.require("text", str) == "naïve\n"
        assert list(file.require_array("ints", int)) == [3, -1]
        assert list(file.require_array("floats", float)) == [0.5, 2.0]
        assert list(file.require_array("flags", bool)) == [True, False]
        words = file.require_array("words", str)
        assert (
            list(words) == ["", "ä", "z"] and len(words) == 3 and words[1] == "ä" and words[1:] == ["ä", "z"]
        )
        assert file.get("absent", int) is None and file.get_array("absent", str) is None
        assert file.tensors["weights"].shape == (4, 3) and file.tensors["halves"].shape == (3, 2, 1)
        assert file.tensors["q"].type_name == "q8_0" and file.tensors["q"].nbytes == 68
        assert np.array_equal(file.data("weights").view(np.float32), weights.reshape(-1))
        kept = file.data("halves")
    assert np.array_equal(kept.view(np.float16), halves.reshape(-1))  # valid after the file is closed
    assert not kept.flags.writeable


def test_equals_the_reference_reader_on_the_embedded_target(demo_target: Path):
    reference = GGUFReader(demo_target)
    with GGUFFile(demo_target) as file:
        keys = {name for name in reference.fields if not name.startswith("GGUF.")}
        assert set(file.metadata) == keys
        for name in keys:
            value, expected = file.metadata[name], reference.fields[name].contents()
            assert (list(value) if isinstance(expected, list) else value) == expected, name
        assert [*file.tensors] == [tensor.name for tensor in reference.tensors]
        for tensor in reference.tensors:
            info = file.tensors[tensor.name]
            assert (info.type, info.shape, info.offset) == (
                tensor.tensor_type,
                tuple(tensor.shape.tolist()),
                tensor.data_offset,
            )
            assert np.array_equal(file.data(tensor.name), tensor.data.reshape(-1).view(np.uint8)), tensor.name


def test_version_2_and_other_alignments(tmp_path: Path):
    data = build(KEYS | {"general.alignment": 8}, TENSORS, version=2, alignment=8).data
    with opened(tmp_path / "x.gguf", data) as file:
        assert file.version == 2
        assert file.data("b").view(np.float32).tolist() == [2.0] * 5


def test_types_are_those_of_the_format():
    """As the `gguf` package has them; ggml may be newer. No file holds Q8_1, whose old size that package keeps."""
    of_format = {code: (code.name.lower(), *sizes) for code, sizes in GGML_QUANT_SIZES.items()}
    del of_format[GGMLQuantizationType.Q8_1]
    types = gguf.ggml_types()
    assert {code: (types[code].name.lower(), *types[code][1:]) for code in of_format} == of_format


# --- bad files ---


def test_truncated_anywhere(tmp_path: Path):
    data = bytes(small().data)
    for end in range(len(data)):
        with pytest.raises(ModelFileError, match="x.gguf"):
            opened(tmp_path / "x.gguf", data[:end])


BAD_FIELDS: list[tuple[str, int, str]] = [
    ("version", 1, "GGUF 1 is not supported"),
    ("version", 4, "GGUF 4 is not supported"),
    ("version", 0x03000000, "big-endian"),
    ("tensor count", 2**63, "tensor count: 9223372036854775808 is absurd"),
    ("tensor count", 4, "tensor '' has 0 dimensions"),
    ("key count", 2**64 - 1, "key count"),
    ("key count", 7, "tensor 0, name: a string of"),
    ("key length", 2**40, "key 0: a string of 1099511627776 bytes is too long"),
    ("'general.architecture' length", 2**63, "'general.architecture'"),
    ("'n' type", 13, "key 'n' has the unknown value type 13"),
    ("'ids' element type", 9, "key 'ids' is an array of arrays"),
    ("'ids' element type", 77, "key 'ids' has the unknown element type 77"),
    ("'ids' count", 2**62, "key 'ids': a length of 4611686018427387904 is absurd"),
    ("'ids' count", 2**20, "the file ends inside key 'ids'"),
    ("'words' count", 2**20, "the file ends inside key 'words'"),
    ("'words' length", 2**64 - 8, "the file ends inside key 'words'"),
    ("'words' length", 2**63, "the file ends inside key 'words'"),
    ("tensor name length", 64, "tensor 0, name: a string of 64 bytes is too long"),
    ("a dimensions", 0, "tensor 'a' has 0 dimensions"),
    ("a dimensions", 5, "tensor 'a' has 5 dimensions"),
    ("a shape", 0, r"tensor 'a' has the empty shape \[0, 3\]"),
    ("a shape", 2**62, "tensor 'a' ends at byte"),
    ("a type", 4, "tensor 'a' has the unknown type 4"),
    ("a type", 8, "tensor 'a': rows of 4 are not a multiple of q8_0's block of 32"),
    ("a type", 99, "tensor 'a' has the unknown type 99"),
    ("b offset", 32, "tensors 'a' and 'b' overlap"),
    ("b offset", 65, "tensor 'b': offset 65 is not a multiple of the alignment 32"),
    ("c offset", 2**63, "tensor 'c' ends at byte"),
]


@pytest.mark.parametrize(("label", "value", "message"), BAD_FIELDS)
def test_bad_field(tmp_path: Path, label: str, value: int, message: str):
    with pytest.raises(ModelFileError, match=message) as caught:
        opened(tmp_path / "x.gguf", patched(small(), label, value))
    assert str(caught.value).startswith(str(tmp_path / "x.gguf")) and "\n" not in str(caught.value)


def rebuilt(change: Callable[[Builder], None]) -> bytes:
    builder = Builder()
    builder.data += b"GGUF"
    builder.number("version", "I", 3)
    change(builder)
    return bytes(builder.data)


def one_key(key: str | bytes, count: int = 1) -> bytes:
    def change(builder: Builder) -> None:
        builder.number("tensor count", "Q", 0)
        builder.number("key count", "Q", count)
        for _ in range(count):
            builder.key(key, 1)

    return rebuilt(change)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"GGU", "not a GGUF file"),
        (b"GGJT" + bytes(60), "starts with b'GGJT'"),
        (b"GGUF", "ends inside version"),
        (one_key(b"\xff\xfe"), "key 0 is not UTF-8"),
        (one_key(""), "key 0 .* is empty"),
        (one_key("k", 2), "key 1 .'k'. is repeated"),
        (bytes(build(KEYS, [TENSORS[0], TENSORS[0]]).data), "tensor 'a' is repeated"),
        (bytes(small(**{"general.alignment": 0}).data), "general.alignment': 0 is not a power of two"),
        (bytes(small(**{"general.alignment": 48}).data), "48 is not a power of two"),
        (bytes(small(**{"general.alignment": "32"}).data), "general.alignment' should be an integer"),
        (bytes(small(**{"split.count": 3}).data), "one of 3 parts of a model"),
    ],
)
def test_bad_file(tmp_path: Path, data: bytes, message: str):
    with pytest.raises(ModelFileError, match=message):
        opened(tmp_path / "x.gguf", data)


PARTS = 3


def write_parts(folder: Path, stem: str = "x") -> list[Path]:
    """A model of three parts: keys and no tensors in the first, a tensor in each of the others."""
    paths = []
    for i in range(PARTS):
        keys = {"split.no": i, "split.count": PARTS, "split.tensors.count": PARTS - 1}
        keys |= {"general.architecture": "qwen35"} if i == 0 else {}
        tensors = [f32_tensor(f"t{i}", (4,), value=i)] if i else []
        paths.append(folder / f"{stem}-{i + 1:05}-of-{PARTS:05}.gguf")
        paths[-1].write_bytes(build(keys, tensors).data)
    return paths


def test_any_part_opens_all(tmp_path: Path):
    for path in write_parts(tmp_path):
        with GGUFFile(path) as file:
            assert file.arch == "qwen35" and list(file.tensors) == ["t1", "t2"] and file.path == path
            assert [file.data(name).view("<f4").tolist() for name in file.tensors] == [[1.0] * 4, [2.0] * 4]
            file.rename({"t2": "second"})
            assert list(file.tensors) == ["t1", "second"] and file.data("second").view("<f4")[0] == 2
            info = file.tensors["second"]
            halves = [
                dataclasses.replace(info, name=name, shape=(2,), offset=info.offset + at, nbytes=8)
                for name, at in (("a", 0), ("b", 8))
            ]
            file.replace("second", halves)
            assert list(file.tensors) == ["t1", "a", "b"]
            assert [file.data(name).view("<f4").tolist() for name in "ab"] == [[2.0] * 2] * 2


def test_parts_that_are_missing_or_foreign(tmp_path: Path):
    first, second, third = write_parts(tmp_path)
    foreign = build({"split.no": 2, "split.count": PARTS}, [f32_tensor("t1", (4,))]).data
    for data, message in (
        (
            second.read_bytes(),
            f"{third.name}: its keys 'split.no' and 'split.count' do not make it part 3 of 3",
        ),
        (foreign, f"{third.name}: tensor 't1' is also in another part"),
        (build({"split.no": 2, "split.count": PARTS}).data, "its 3 parts hold 1 tensors, not 2"),
        (third.read_bytes()[:-1], f"{third.name}: tensor 't2' ends at byte"),
    ):
        third.write_bytes(data)
        with pytest.raises(ModelFileError, match=message):
            GGUFFile(first)
    third.unlink()
    with pytest.raises(ModelFileError, match=f"{first.name}: part 3 of 3 is missing: download {third.name}"):
        GGUFFile(first)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="name does not end in -0000N-of-00003.gguf"):
        GGUFFile(renamed)


def test_names_of_parts():
    assert part_names("a-00002-of-00002.gguf") == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    for alone in ("a.gguf", "a-00001-of-00001.gguf", "a-1-of-2.gguf"):
        assert part_names(alone) == [alone]


def test_strings_that_are_not_utf8_are_reported_on_use(tmp_path: Path):
    data = bytes(small().data).replace("ü".encode(), b"\xc3\x28")
    with (
        opened(tmp_path / "x.gguf", data) as file,
        pytest.raises(ModelFileError, match=r"key 'words': string 2"),
    ):
        list(file.metadata["words"])


def test_not_a_file(tmp_path: Path):
    with pytest.raises(ModelFileError, match="no such file"):
        GGUFFile(tmp_path / "absent.gguf")
    for path, what in (
        (tmp_path, "not a regular file"),
        ("a\0b", "cannot be read"),
        ("x" * 5000, "cannot be read"),
    ):
        with pytest.raises(ModelFileError, match=what):
            GGUFFile(path)


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        ("absent", int, "key 'absent' is missing .expected an integer"),
        ("x", int, r"key 'x' should be an integer but is a number .'0.5'"),
        ("n", str, "key 'n' should be a string but is an integer"),
        ("flag", int, "key 'flag' should be an integer but is true or false"),
        ("n", bool, "key 'n' should be true or false"),
        ("words", str, "key 'words' should be a string but is an array of 3"),
        ("ids", int, "key 'ids' should be an integer but is an array of 3 int32 values"),
    ],
)
def test_wrong_kind_of_value(tmp_path: Path, key: str, kind: type, message: str):
    with opened(tmp_path / "x.gguf", small().data) as file, pytest.raises(ModelFileError, match=message):
        file.require(key, kind)


@pytest.mark.parametrize(
    ("key", "kind"), [("n", int), ("words", int), ("ids", str), ("ids", bool), ("absent", str)]
)
def test_wrong_kind_of_array(tmp_path: Path, key: str, kind: type):
    with (
        opened(tmp_path / "x.gguf", small().data) as file,
        pytest.raises(ModelFileError, match=f"key '{key}'"),
    ):
        file.require_array(key, kind)


def test_absurd_numbers_allocate_nothing(tmp_path: Path):
    builder = small()
    tracemalloc.start()
    try:
        for field in builder.fields:
            data = patched(builder, field.label, 2 ** (8 * field.size) - 1)
            with suppress(ModelFileError):
                opened(tmp_path / "x.gguf", data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- fuzzing: a damaged copy of a valid file is read, or refused with our one error ---

MODELS = {
    "small": (small(), GGUFFile),
    "target": (
        tiny_models.gguf_file(tiny_models.target_keys(), tiny_models.target_shapes()),
        lambda path: (Qwen35.from_gguf(GGUFFile(path)), Tokenizer.from_gguf(GGUFFile(path))),
    ),
    "draft": (
        tiny_models.gguf_file(tiny_models.upstream_draft_keys(), tiny_models.draft_shapes()),
        DraftFile.open,
    ),
}
NUMBERS = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 40),
    st.sampled_from([2**n + d for n in (7, 8, 15, 16, 31, 32, 62, 63, 64) for d in (-1, 0, 1)]),
)


@st.composite
def damaged(draw: st.DrawFn, builder: Builder) -> bytes:
    """The file with one to four things wrong, most of them numbers of the header."""
    data = bytearray(builder.data)
    header = builder.fields[-1].offset + 8
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, header - 1))
        match draw(st.sampled_from(["number"] * 5 + ["byte", "insert", "delete", "truncate"])):
            case "number":
                field = builder.fields[draw(st.integers(0, len(builder.fields) - 1))]
                value = draw(NUMBERS) % 2 ** (8 * field.size)
                data[field.offset : field.offset + field.size] = value.to_bytes(field.size, "little")
            case "byte":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "insert":
                data[at:at] = draw(st.binary(max_size=9))
            case "delete":
                del data[at : at + draw(st.integers(1, 9))]
            case "truncate":
                del data[at:]
    return bytes(data)


@pytest.mark.parametrize("name", MODELS)
def test_fuzz(tmp_path: Path, name: str):
    builder, load = MODELS[name]
    path = tmp_path / "x.gguf"

    @settings(max_examples=1000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(damaged(builder))
    def run(data: bytes) -> None:
        path.write_bytes(data)
        try:
            load(path)
        except ModelFileError as error:
            assert str(path) in str(error) and "\n" not in str(error)

    path.write_bytes(builder.data)
    load(path)
    run()


def test_struct_layout_of_the_builder():
    """The builder itself: a header by hand."""
    expected = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<II", 4, 7)
    assert bytes(build({"k": 7}).data) == expected
