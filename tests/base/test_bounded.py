"""Files that somebody else wrote: every read ends, and what is wrong is one line."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_fix.base.bounded import DIGITS, check_regular, parse_json, read_bytes, read_json
from dcp_fix.base.errors import UserError, shown, shown_lines


def test_a_regular_file_is_read_whole(tmp_path):
    (tmp_path / "f").write_bytes(b'{"a": [1, 2.5, null]}')
    assert read_json(tmp_path / "f", most=21) == {"a": [1, 2.5, None]}
    assert check_regular(tmp_path / "f") == 21


def test_a_file_of_one_byte_too_many_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(b"12345")
    assert read_bytes(tmp_path / "f", most=5) == b"12345"
    with pytest.raises(UserError, match="f: longer than 4 bytes"):
        read_bytes(tmp_path / "f", most=4)


def test_what_is_absent_is_told_from_what_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "f", most=4)
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(UserError, match="f/g: cannot be read"):
        read_bytes(tmp_path / "f" / "g", most=4)


@pytest.mark.parametrize(
    "make, kind",
    [
        (os.mkdir, "a folder"),
        (os.mkfifo, "a FIFO"),
        (lambda path: os.symlink("/dev/zero", path), "a device"),
        (lambda path: os.symlink("/dev/null", path), "a device"),
        (lambda path: os.symlink(os.path.basename(path), path), "cannot be read"),
    ],
)
def test_what_is_no_file_is_refused_at_once(tmp_path, make, kind):
    make(tmp_path / "x")
    with pytest.raises(UserError, match=f"x: .*{kind}"):
        read_bytes(tmp_path / "x", most=100)
    assert len(os.listdir("/proc/self/fd")) < 200, "descriptors are left open"


@pytest.mark.parametrize(
    "text, said",
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"9" * (DIGITS + 1), f"an integer of {DIGITS + 1} digits; at most {DIGITS}"),
        (b'{"hidden_size": 1' + b"0" * 5000 + b"}", "an integer of 5001 digits"),
        (b"[NaN]", "NaN is no JSON"),
        (b"[-Infinity]", "-Infinity is no JSON"),
        (b"[-1e999]", "-1e999 is beyond what a float holds"),
        (b'{"a": 1, "b": 2, "a": 3}', "the name 'a' comes twice in one object"),
        (b"\xff\xfe", "not a whole JSON file"),
        (b"\xef\xbb\xbf{}", "not a whole JSON file"),
        (b"", "not a whole JSON file"),
        (b'{"a": 1', "not a whole JSON file"),
    ],
)
def test_text_that_is_no_plain_json_is_one_line(text, said):
    with pytest.raises(UserError, match=said) as caught:
        parse_json(text, "f.json")
    assert str(caught.value).startswith("f.json: ") and str(caught.value).isprintable()


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:0123456789.eE-+ntfalse\\', max_size=40).map(str.encode))
def test_any_bytes_are_parsed_or_refused(data):
    try:
        parse_json(data, "f")
    except UserError as error:
        assert str(error).startswith("f: ") and str(error).isprintable()


@given(st.text(), st.integers(1, 20))
def test_shown_text_is_what_a_terminal_may_see(text, most):
    assert shown(text, most).isprintable()
    assert shown_lines(text).replace("\n", "").isprintable()
    if text.isprintable() and len(text) <= most:
        assert shown(text, most) == text
