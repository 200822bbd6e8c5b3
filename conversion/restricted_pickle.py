"""Interprets pickles without importing anything: the result is containers, numbers, strings and inert records.

A pickle is a program for a small stack machine, and the standard library's machine imports and calls whatever the
program names. This one cannot import, and the only functions that it calls are stand-ins given by its caller. It is an
interpreter of its own rather than a subclass of `pickle.Unpickler` with another `find_class`, which puts real classes
on the stack: one overlooked path to an attribute of theirs would be an exploit.

The instructions are those of protocols 0 to 5, described in the standard library's `pickletools`. Tensors are left to
`torch_objects.py`, which lists the names that may occur and what they become.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

# An instruction of one byte can create a container of 200 bytes; this bounds the memory of such files. The sentences
# of a corpus, or the lists of pairs in which Python 2 wrote an ordered vocabulary, stay below it.
MAX_OBJECTS = 2**22
# Python 2 wrote small numbers as long ones, and torch writes one of 80 bits; no larger ones occur.
MAX_INTEGER_BYTES = 32
PLAIN_TYPES = frozenset((str, int, float, bytes, bool, type(None)))


class UnsafeFileError(ValueError):
    """A file names a class or function that no Transformer-XL file contains. It was neither imported nor called."""


@dataclass(eq=False)
class StoredObject:
    """An inert record of an object whose class was not imported.

    Args:
        class_path (`str`): module and name in the file.
        arguments (`tuple`): arguments of the call that made the object.
        state (`dict[str, Any]`): the attributes that were stored.
    """

    class_path: str
    arguments: tuple[Any, ...] = field(default=(), repr=False)
    # not shown: the state of a module contains its sub-modules
    state: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class StoredName:
    """A class or function that a file names; `build` is called in its place."""

    class_path: str
    build: Callable[..., Any] = field(repr=False)


def printable(text: str | bytes | BaseException, longest: int = 120) -> str:
    """`text` made safe for a message: without line breaks and control codes, at most `longest` characters."""
    escaped = str(text)[: longest + 1].encode("ascii", "backslashreplace").decode()
    escaped = "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in escaped)
    return escaped if len(escaped) <= longest else f"{escaped[:longest]}..."


class PickleReader:
    """Interprets one pickle.

    Args:
        data: the bytes, or a mapping of the file that holds them.
        position: where the pickle begins; after `read`, where it ends.
        find_name: called with module and name of every class or function; returns what to put on the stack.
        find_storage: called with the identifier of every object outside the pickle.

    `read` raises `ValueError` with the reason if the data are not a complete and valid pickle.
    """

    def __init__(
        self,
        data: bytes | mmap,
        position: int,
        find_name: Callable[[str, str], Any],
        find_storage: Callable[[Any], Any],
    ):
        self.data = data
        self.position = position
        self.find_name = find_name
        self.find_storage = find_storage
        self.end = len(data)
        self.memo: dict[int, Any] = {}
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []  # the stacks below each mark
        self.num_objects = 0  # containers, marks and calls

    def read(self) -> Any:
        """The value of the pickle."""
        find_value, find_action, data = VALUES.get, ACTIONS.get, self.data
        try:
            while self.position < self.end:
                code = data[self.position]
                self.position += 1
                if (make_value := find_value(code)) is not None:
                    value = make_value(self)  # this may replace `self.stack`
                    self.stack.append(value)
                elif (action := find_action(code)) is not None:
                    action(self)
                elif code == STOP:
                    break
                else:
                    raise ValueError(f"has an instruction that does not exist: {bytes([code])!r}")
            else:
                raise ValueError("ends early")
            result = self.stack.pop()
        except IndexError:  # of the bytes or of the stack
            reason = "ends early" if self.position > self.end else "takes a value from an empty stack"
            raise ValueError(reason) from None
        except UnicodeDecodeError as error:
            raise ValueError(f"has a text that is not {error.encoding}") from None
        if self.stack or self.marked:
            raise ValueError("leaves values on the stack")
        return result

    def take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if self.position > self.end:
            raise ValueError(f"ends early: an instruction needs {count} bytes and {self.end - start} are left")
        return self.data[start : self.position]

    def take_byte(self) -> int:
        position = self.position
        self.position = position + 1
        return self.data[position]

    def take_size(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def take_line(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise ValueError("ends early: a line has no end")
        line = self.data[self.position : end]
        self.position = end + 1
        return line

    def take_name(self) -> Any:
        module, name = self.take_line(), self.take_line()
        return self.find_name(module.decode("utf-8"), name.decode("utf-8"))

    def pop_to_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marked.pop()
        return items

    def pop_count(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise IndexError
        items = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return items

    def count_object(self) -> None:
        self.num_objects += 1
        if self.num_objects > MAX_OBJECTS:
            raise ValueError(f"holds more than {MAX_OBJECTS} objects")

    def new(self, kind: Callable[..., Any], *items: Any) -> Any:
        self.count_object()
        return kind(*items)

    def new_frozenset(self, items: list[Any]) -> frozenset[Any]:
        check_keys(items)
        self.count_object()
        return frozenset(items)

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]
        if len(self.memo) > MAX_OBJECTS:
            raise ValueError(f"refers to more than {MAX_OBJECTS} values")

    def recall(self, index: int) -> Any:
        try:
            return self.memo[index]
        except KeyError:
            raise ValueError(f"refers to value {index} before there is one") from None

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_to_mark()

    def mark(self) -> None:
        self.count_object()
        self.marked.append(self.stack)
        self.stack = []

    def call(self, name: Any, arguments: Any) -> Any:
        self.count_object()
        if not isinstance(name, StoredName) or type(arguments) is not tuple:
            raise ValueError(f"calls {type(name).__name__} with {type(arguments).__name__}")
        try:
            return name.build(*arguments)
        except TypeError:
            raise ValueError(f"calls `{name.class_path}` with {len(arguments)} arguments") from None


def check_keys(keys: Iterable[Any]) -> None:
    """Raise `ValueError` unless all of `keys` are texts, numbers, None or tuples of those.

    Other keys do not occur, and hashing nested tuples can take exponential time.
    """
    keys = list(keys)
    if PLAIN_TYPES.issuperset(map(type, keys)):
        return
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        if not PLAIN_TYPES.issuperset(map(type, parts)):
            raise ValueError(f"has a key of type {type(key).__name__}")


def read_text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def read_text_of_python2(raw: bytes) -> str:
    """A byte string of Python 2: UTF-8 where it is valid, else one character per byte."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def read_long(raw: bytes) -> int:
    if len(raw) > MAX_INTEGER_BYTES:
        raise ValueError(f"has a whole number of {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True)


def read_decimal(line: bytes) -> int:
    if not re.fullmatch(rb"[+-]?[0-9]{1,80}", line):
        raise ValueError(f"has {printable(line, 40)} where a number must be")
    return int(line)


def read_int_line(line: bytes) -> int | bool:
    # protocol 0 writes True and False as the two numbers with a leading zero
    return line == b"01" if line in (b"00", b"01") else read_decimal(line)


def read_float_line(line: bytes) -> float:
    try:
        return float(line)
    except ValueError:
        raise ValueError(f"has {printable(line, 40)} where a number must be") from None


def read_quoted_line(line: bytes) -> str:
    """A byte string in the notation of Python 2: in quotes, with backslash escapes."""
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise ValueError("has a string without quotes")
    letters = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}

    def unescape(match: re.Match[bytes]) -> bytes:
        number, letter, wrong = match.groups()
        if wrong is not None:
            raise ValueError("has a string with an escape that Python 2 never wrote")
        return bytes([int(number, 16)]) if number else letters.get(letter, letter)

    return read_text_of_python2(re.sub(rb"\\(?:x([0-9a-f]{2})|([\\'\"nrt])|(.?))", unescape, line[1:-1]))


def counted(width: int, read: Callable[[bytes], Any]) -> Callable[[PickleReader], Any]:
    """A value preceded by its length in `width` bytes. Most instructions are such, so this is optimised for speed."""

    def take_value(reader: PickleReader) -> Any:
        data, start = reader.data, reader.position + width
        end = start + int.from_bytes(data[start - width : start], "little")
        if max(start, end) > reader.end:
            raise ValueError("ends early: within a value")
        reader.position = end
        return read(data[start:end])

    return take_value


def line(read: Callable[[bytes], Any]) -> Callable[[PickleReader], Any]:
    """A value written as text, to the end of the line."""
    return lambda reader: read(reader.take_line())


def refused(reason: str) -> Callable[[PickleReader], Any]:
    def refuse(reader: PickleReader) -> Any:
        raise ValueError(reason)

    return refuse


# --- instructions of more than one step


def append_items(reader: PickleReader, items: list[Any]) -> None:
    target = reader.stack[-1]
    if type(target) is not list:
        raise ValueError(f"appends to {type(target).__name__}")
    target.extend(items)


def set_items(reader: PickleReader, items: list[Any]) -> None:
    target = reader.stack[-1]
    if type(target) is not dict or len(items) % 2:
        raise ValueError(f"sets {len(items)} keys and values of {type(target).__name__}")
    check_keys(items[::2])
    target.update(zip(items[::2], items[1::2], strict=True))


def add_items(reader: PickleReader, items: list[Any]) -> None:
    target = reader.stack[-1]
    if type(target) is not set:
        raise ValueError(f"adds to {type(target).__name__}")
    check_keys(items)
    target.update(items)


def call_with_keywords(reader: PickleReader) -> Any:
    name, arguments, keywords = reader.pop_count(3)
    if type(keywords) is not dict or keywords:
        raise ValueError("calls a class with keywords")
    return reader.call(name, arguments)


def call_marked(reader: PickleReader) -> Any:
    items = reader.pop_to_mark()
    return reader.call(items[0], tuple(items[1:]))


def call_line(reader: PickleReader) -> Any:
    name = reader.take_name()
    return reader.call(name, tuple(reader.pop_to_mark()))


def find_stacked_name(reader: PickleReader) -> Any:
    module, name = reader.pop_count(2)
    if type(module) is not str or type(name) is not str:
        raise ValueError("names a class by something other than two texts")
    return reader.find_name(module, name)


def find_extension(reader: PickleReader, width: int) -> Any:
    return reader.find_name("copyreg", f"extension {reader.take_size(width)}")


def set_state(reader: PickleReader) -> None:
    """Store attributes. Those of an `OrderedDict` or `Counter` (torch notes layer versions there) are not kept."""
    state = reader.stack.pop()
    target = reader.stack[-1]
    if isinstance(target, StoredObject) and type(state) is tuple and len(state) > 2:
        # an array of NumPy reads its own state: version, shape, type, order, values
        target.state["__setstate__"] = state
        return
    # the second form also gives attributes that the class declared in `__slots__`
    parts = state if type(state) is tuple and len(state) == 2 else (state, None)
    for part in parts:
        if part is not None and (type(part) is not dict or not all(type(key) is str for key in part)):
            raise ValueError("gives an object a state that is not a dictionary of its attributes")
    if isinstance(target, StoredObject):
        for part in parts:
            target.state.update(part or {})
    elif type(target) is not dict:
        raise ValueError(f"gives {type(target).__name__} attributes")


def make_dictionary(reader: PickleReader) -> None:
    items = reader.pop_to_mark()
    reader.stack.append(reader.new(dict))
    set_items(reader, items)


def check_protocol(reader: PickleReader) -> None:
    protocol = reader.take_size(1)
    if protocol > 5:
        raise ValueError(f"has protocol {protocol}; the newest known one is 5")


# instructions that put one value on the stack
VALUES_BY_LETTER: dict[bytes, Callable[[PickleReader], Any]] = {
    b"N": lambda reader: None,
    b"\x88": lambda reader: True,
    b"\x89": lambda reader: False,
    # numbers
    b"K": PickleReader.take_byte,
    b"M": lambda reader: reader.take_size(2),
    b"J": lambda reader: struct.unpack("<i", reader.take(4))[0],
    b"G": lambda reader: struct.unpack(">d", reader.take(8))[0],
    b"\x8a": counted(1, read_long),
    b"\x8b": counted(4, read_long),
    b"I": line(read_int_line),
    b"L": line(lambda text: read_decimal(text.removesuffix(b"L"))),
    b"F": line(read_float_line),
    # texts
    b"X": counted(4, read_text),
    b"\x8c": counted(1, read_text),
    b"\x8d": counted(8, read_text),
    b"V": line(lambda text: text.decode("raw-unicode-escape")),
    b"T": counted(4, read_text_of_python2),
    b"U": counted(1, read_text_of_python2),
    b"S": line(read_quoted_line),
    # bytes
    b"B": counted(4, bytes),
    b"C": counted(1, bytes),
    b"\x8e": counted(8, bytes),
    b"\x96": counted(8, bytes),  # a bytearray, read as bytes
    # containers
    b"]": lambda reader: reader.new(list),
    b"}": lambda reader: reader.new(dict),
    b"\x8f": lambda reader: reader.new(set),
    b")": lambda reader: (),
    b"\x85": lambda reader: reader.new(tuple, reader.pop_count(1)),
    b"\x86": lambda reader: reader.new(tuple, reader.pop_count(2)),
    b"\x87": lambda reader: reader.new(tuple, reader.pop_count(3)),
    b"t": lambda reader: reader.new(tuple, reader.pop_to_mark()),
    b"l": lambda reader: reader.new(list, reader.pop_to_mark()),
    b"\x91": lambda reader: reader.new_frozenset(reader.pop_to_mark()),
    # memoised values
    b"2": lambda reader: reader.stack[-1],
    b"g": lambda reader: reader.recall(read_decimal(reader.take_line())),
    b"h": lambda reader: reader.recall(reader.take_byte()),
    b"j": lambda reader: reader.recall(reader.take_size(4)),
    # names, and calls of them
    b"c": lambda reader: reader.take_name(),
    b"\x93": find_stacked_name,
    b"\x82": lambda reader: find_extension(reader, 1),
    b"\x83": lambda reader: find_extension(reader, 2),
    b"\x84": lambda reader: find_extension(reader, 4),
    b"R": lambda reader: reader.call(*reader.pop_count(2)),
    b"\x81": lambda reader: reader.call(*reader.pop_count(2)),
    b"\x92": call_with_keywords,
    b"o": call_marked,
    b"i": call_line,
    # values outside the pickle
    b"Q": lambda reader: reader.find_storage(reader.stack.pop()),
    b"P": refused("refers to an object by a line of text"),
    b"\x97": refused("keeps data outside the file"),
}


# all other instructions
ACTIONS_BY_LETTER: dict[bytes, Callable[[PickleReader], Any]] = {
    b"\x80": check_protocol,
    b"\x95": lambda reader: reader.take(8),  # length of a frame, not used: every instruction checks its own bounds
    b"(": PickleReader.mark,
    b"0": PickleReader.pop,
    b"1": lambda reader: reader.pop_to_mark(),
    b"p": lambda reader: reader.remember(read_decimal(reader.take_line())),
    b"q": lambda reader: reader.remember(reader.take_byte()),
    b"r": lambda reader: reader.remember(reader.take_size(4)),
    b"\x94": lambda reader: reader.remember(len(reader.memo)),
    b"a": lambda reader: append_items(reader, list(reader.pop_count(1))),
    b"e": lambda reader: append_items(reader, reader.pop_to_mark()),
    b"d": make_dictionary,
    b"s": lambda reader: set_items(reader, list(reader.pop_count(2))),
    b"u": lambda reader: set_items(reader, reader.pop_to_mark()),
    b"\x90": lambda reader: add_items(reader, reader.pop_to_mark()),
    b"b": set_state,
    b"\x98": refused("keeps data outside the file"),
}

STOP = ord(".")
VALUES = {letter[0]: make_value for letter, make_value in VALUES_BY_LETTER.items()}
ACTIONS = {letter[0]: action for letter, action in ACTIONS_BY_LETTER.items()}
