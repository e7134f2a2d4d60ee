//! Length-prefixed frames: whole messages out of a byte stream that arrives in any pieces.

use prost::Message as _;

use super::message::Message;
use super::{schema, violation};
use crate::error::{Error, ErrorKind, Result};

/// Largest frame: a grant with a scattered block table.
pub const MAX_FRAME: usize = 64 << 20;
/// Largest frame of any other kind, and of all kinds before the peer has shown who it is.
pub const HELLO_CAP: usize = 4 << 20;

const HEADER: usize = 4;

/// Writes one frame: length and envelope.
///
/// # Errors
/// `Capacity` when the message is larger than its kind may be: [`MAX_FRAME`] for a grant (a table of
/// some sixteen million scattered blocks), [`HELLO_CAP`] for the others.
pub fn encode(message: &Message) -> Result<Vec<u8>> {
    let envelope = schema::Envelope::from(message);
    let len = envelope.encoded_len();
    let cap = if matches!(message, Message::Grant(_)) {
        MAX_FRAME
    } else {
        HELLO_CAP
    };
    if len > cap {
        let text = format!(
            "message `{}` has `{len}` bytes, a frame of its kind holds `{cap}`",
            message.name()
        );
        return Err(Error::new(ErrorKind::Capacity, "encode message", text).with_hint("split the transfer"));
    }
    let mut frame = Vec::with_capacity(HEADER + len);
    frame.extend_from_slice(&(len as u32).to_le_bytes());
    envelope.encode_raw(&mut frame);
    Ok(frame)
}

/// Cuts a byte stream into messages. After an error it gives that error again: the stream is lost.
#[derive(Debug)]
pub struct FrameDecoder {
    buffer: Vec<u8>,
    start: usize,
    cap: usize,
    failed: Option<Error>,
}

impl FrameDecoder {
    /// A decoder that refuses frames larger than `cap` bytes.
    pub fn new(cap: usize) -> Self {
        Self {
            buffer: Vec::new(),
            start: 0,
            cap,
            failed: None,
        }
    }

    /// A decoder for a connection whose peer is not known yet.
    pub fn before_hello() -> Self {
        Self::new(HELLO_CAP)
    }

    /// Changes the cap, once the peer is known.
    pub fn set_cap(&mut self, cap: usize) {
        self.cap = cap;
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.failed.is_some() {
            return;
        }
        if self.start == self.buffer.len() {
            self.buffer.clear();
            self.start = 0;
        } else if self.start > self.buffer.len() / 2 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Bytes received and not yet part of a returned message.
    pub fn pending(&self) -> usize {
        self.buffer.len() - self.start
    }

    /// Takes the bytes that are not yet part of a returned message: what followed a `StreamHello`.
    pub fn take_rest(&mut self) -> Vec<u8> {
        let rest = self.buffer.split_off(self.start);
        self.buffer.clear();
        self.start = 0;
        rest
    }

    /// The next whole message, or `None` until more bytes come.
    ///
    /// # Errors
    /// `Handshake` for a frame that is too long or that is not a valid message. The error repeats.
    #[expect(
        clippy::should_implement_trait,
        reason = "a fallible, resumable next is not an iterator"
    )]
    pub fn next(&mut self) -> Result<Option<Message>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let result = self.cut();
        if let Err(error) = &result {
            self.failed = Some(error.clone());
            self.buffer = Vec::new();
            self.start = 0;
        }
        result
    }

    fn cut(&mut self) -> Result<Option<Message>> {
        let bytes = &self.buffer[self.start..];
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let len = u32::from_le_bytes(*header) as usize;
        if len > self.cap {
            return Err(violation(format!(
                "frame of `{len}` bytes, at most `{}` are allowed",
                self.cap
            )));
        }
        let Some(body) = rest.get(..len) else {
            return Ok(None);
        };
        // Decoding can take far more memory than the frame (a two-byte empty element becomes a whole
        // struct), so only the one compact kind may be large.
        if len > HELLO_CAP && !is_one_grant(body) {
            return Err(violation(format!(
                "frame of `{len}` bytes is not a grant, at most `{HELLO_CAP}` are allowed"
            )));
        }
        let envelope = schema::Envelope::decode(body)
            .map_err(|e| violation("frame is not a message of this protocol").with_source(e))?;
        let message = Message::try_from(envelope)?;
        self.start += HEADER + len;
        Ok(Some(message))
    }
}

/// Whether the envelope is a grant from its first byte to its last.
fn is_one_grant(mut body: &[u8]) -> bool {
    use prost::encoding::{WireType, decode_key, decode_varint};
    matches!(
        decode_key(&mut body),
        Ok((schema::GRANT_TAG, WireType::LengthDelimited))
    ) && decode_varint(&mut body).is_ok_and(|len| len == body.len() as u64)
}
