//! The outer shape of a frame: sixteen bytes, little-endian, and a body whose size the kind bounds.

use crate::{Error, ErrorKind, Result};

/// Bytes of a header.
pub const HEADER: usize = 16;

const MAGIC: u32 = 0x5044_4B50; // "PKDP"

/// Begins a frame; [`finish`] writes its length.
pub(super) fn begin(out: &mut Vec<u8>, kind: u8) -> usize {
    let start = out.len();
    out.extend_from_slice(&MAGIC.to_le_bytes());
    out.extend_from_slice(&[kind, 0, 0, 0]);
    out.extend_from_slice(&[0; 8]);
    start
}

/// Writes the length of the frame that began at `start`, with `more` bytes to come.
pub(super) fn finish(out: &mut [u8], start: usize, more: usize) {
    let body = (out.len() - start - HEADER + more) as u32;
    out[start + 8..start + 12].copy_from_slice(&body.to_le_bytes());
}

/// The kind of the frame at the start of `input`, its body, and the bytes of both; `None` when more must come first.
/// A bad header is an error at once, whatever was to follow it. `bounds` says how many bytes the body of a kind has.
pub(super) fn split(input: &[u8], bounds: impl Fn(u8) -> Option<(usize, usize)>) -> Result<Option<(u8, &[u8], usize)>> {
    let Some((header, rest)) = input.split_at_checked(HEADER) else {
        return Ok(None);
    };
    if word32(header, 0) != MAGIC {
        return Err(garbage("magic", u64::from(word32(header, 0))));
    }
    if header[5..8] != [0; 3] || word32(header, 12) != 0 {
        return Err(garbage("reserved bytes", u64::from(word32(header, 12))));
    }
    let (kind, len) = (header[4], word32(header, 8) as usize);
    let (least, most) = bounds(kind).ok_or_else(|| garbage("kind", u64::from(kind)))?;
    if !(least..=most).contains(&len) {
        return Err(garbage("body length", len as u64));
    }
    Ok(rest.get(..len).map(|body| (kind, body, HEADER + len)))
}

pub(super) fn words(out: &mut Vec<u8>, words: &[u64]) {
    for word in words {
        out.extend_from_slice(&word.to_le_bytes());
    }
}

pub(super) fn word32(raw: &[u8], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&raw[at..at + 4]);
    u32::from_le_bytes(bytes)
}

pub(super) fn word(raw: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&raw[at..at + 8]);
    u64::from_le_bytes(bytes)
}

/// Appends a text of ours, cut to what may be sent.
pub(super) fn text(out: &mut Vec<u8>, said: &str) {
    let mut end = said.len().min(super::MAX_TEXT);
    while !said.is_char_boundary(end) {
        end -= 1;
    }
    out.extend_from_slice(&said.as_bytes()[..end]);
}

pub(super) fn string(raw: &[u8]) -> Result<&str> {
    core::str::from_utf8(raw).map_err(|_| garbage("text of bytes", raw.len() as u64))
}

/// A code of an [`ErrorKind`] from the wire.
pub(super) fn kind_of(code: u64) -> Result<ErrorKind> {
    u16::try_from(code)
        .map(|code| ErrorKind::from_code(u32::from(code)))
        .map_err(|_| garbage("error code", code))
}

pub(super) fn garbage(what: &str, value: u64) -> Error {
    Error::new(
        ErrorKind::Integrity,
        "pipe",
        format!("a frame of the pipe has an impossible {what} `{value:#x}`"),
    )
    .with_hint("the stream is not in step, or the other end is no pdkv engine")
}
