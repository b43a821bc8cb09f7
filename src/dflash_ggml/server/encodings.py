"""Decoding of compressed request bodies, bounded by the body limit."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable
from io import BytesIO

import brotli

from .errors import ApiError, bad_request

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# 8 MiB, the most that HTTP allows (RFC 9659)
_ZSTD_WINDOW: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}
_ERRORS = (EOFError, OSError, zlib.error, zstd.ZstdError, brotli.error)


def _gzip(body: bytes, most: int) -> bytes:
    return gzip.GzipFile(fileobj=BytesIO(body)).read(most)


def _deflate(body: bytes, most: int) -> bytes:
    """Inflate with zlib's header, as standardised, or without, as some clients send it."""
    has_header = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    stream = zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
    plain = stream.decompress(body, most)
    if len(plain) < most and not stream.eof:
        raise EOFError("it ends too early")
    return plain


def _zstd(body: bytes, most: int) -> bytes:
    return zstd.ZstdFile(BytesIO(body), options=_ZSTD_WINDOW).read(most)


def _brotli(body: bytes, most: int) -> bytes:
    stream = brotli.Decompressor()
    plain: bytes = stream.process(body, output_buffer_limit=most)
    if len(plain) < most and not stream.is_finished():
        raise EOFError("it ends too early")
    return plain


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
    "br": _brotli,
}


def check_encoding(encoding: str) -> None:
    """Raise ApiError 415 for an unsupported content encoding; "" and "identity" mean none."""
    if encoding not in ("", "identity", *_DECODERS):
        known = ", ".join(_DECODERS)
        message = (
            f"content-encoding {encoding!r:.80} is not understood; send the body plain, or as one of {known}"
        )
        raise ApiError(415, message, "content-encoding", "unsupported_content_encoding")


def decoded(body: bytes, encoding: str, most: int) -> bytes:
    """A body without its content encoding, one that `check_encoding` lets pass.

    Raises:
        ApiError: 400 for an invalid body, 413 for more than `most` bytes.
    """
    if encoding not in _DECODERS:
        return body
    try:
        plain = _DECODERS[encoding](body, most + 1)
    except _ERRORS as error:
        message = f"the body is not valid {encoding}: {error}"
        raise bad_request(message, "content-encoding", "invalid_content_encoding") from None
    if len(plain) > most:
        raise too_large(most)
    return plain


def too_large(most: int) -> ApiError:
    """413 for a body of more than `most` bytes, sent or decoded."""
    return ApiError(413, f"the body is larger than {most} bytes", code="request_too_large")
