//! The headers of answers on a data stream. Payload follows a header directly and in the order of the
//! named units. What requests look like is in [`request`](crate::transport::request).

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Stop;

use super::socket::Socket;
use crate::transport::request::{garbage, word32, word64};

/// Bytes of an error message in a response.
pub(crate) const MAX_MESSAGE: usize = 4096;

const RESPONSE_MAGIC: u32 = 0x5244_4B50; // "PKDR"

/// The fixed part of an answer: either the payload follows (for `Get`), or an error message does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Response {
    /// 0 or an error code of the catalogue.
    pub(crate) code: u16,
    /// Bytes of the message that follows.
    pub(crate) message_len: u16,
    /// Payload bytes that follow (`Get`) or were placed (`Put`).
    pub(crate) bytes: u64,
}

impl Response {
    pub(crate) const SIZE: usize = 16;

    pub(crate) fn encode(&self) -> [u8; Self::SIZE] {
        let mut out = [0; Self::SIZE];
        out[0..4].copy_from_slice(&RESPONSE_MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&self.code.to_le_bytes());
        out[6..8].copy_from_slice(&self.message_len.to_le_bytes());
        out[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    /// # Errors
    /// `Integrity` for anything that [`encode`](Self::encode) doesn't write.
    pub(crate) fn decode(raw: &[u8; Self::SIZE]) -> Result<Self> {
        if word32(raw, 0) != RESPONSE_MAGIC {
            return Err(garbage("response magic", u64::from(word32(raw, 0))));
        }
        let half = |at: usize| u16::from_le_bytes([raw[at], raw[at + 1]]);
        let response = Self {
            code: half(4),
            message_len: half(6),
            bytes: word64(raw, 8),
        };
        if usize::from(response.message_len) > MAX_MESSAGE {
            return Err(garbage("message length", u64::from(response.message_len)));
        }
        Ok(response)
    }

    /// What the owner has against it; reads the message that follows then.
    ///
    /// # Errors
    /// `PeerLost`, `TransferCancelled`: the message did not come.
    pub(crate) fn refusal(&self, socket: &Socket, stop: &dyn Stop) -> Result<Option<Error>> {
        if self.code == 0 {
            return Ok(None);
        }
        let mut message = vec![0; usize::from(self.message_len)];
        socket.read_exact(&mut message, stop)?;
        let text = format!("the peer refused: {}", String::from_utf8_lossy(&message));
        Ok(Some(Error::new(
            ErrorKind::from_code(u32::from(self.code)),
            "tcp",
            text,
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_response_that_encodes_to_them_or_to_a_refusal(mut raw in any::<[u8; Response::SIZE]>(), near in any::<bool>()) {
            if near {
                raw[0..4].copy_from_slice(&RESPONSE_MAGIC.to_le_bytes());
            }
            if let Ok(response) = Response::decode(&raw) {
                prop_assert_eq!(response.encode(), raw);
            }
        }
    }
}
