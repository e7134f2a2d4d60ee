//! What the receiver of a pipe says.

use super::MAX_TEXT;
use super::frame::{begin, finish, kind_of, split, string, text, word, words};
use crate::id::RegionId;
use crate::{ErrorKind, Result};

// Other numbers than the sender's, so that a stream that is echoed is garbage.
const PLACE: u8 = 17;
const RECEIVED: u8 = 18;
const REFUSED: u8 = 19;
const GONE: u8 = 20;

/// One frame from the receiver to the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToSender<'a> {
    /// Write the item's bytes here.
    Place {
        /// The item's number.
        seq: u64,
        /// A region that was advertised to the sender.
        region: RegionId,
        /// Where in it.
        offset: u64,
    },
    /// So many items are in the receiver's hands.
    Received {
        /// Counted from the first.
        items: u64,
    },
    /// The receiver won't go on.
    Refused {
        /// What kind of error the sender should see.
        kind: ErrorKind,
        /// Why.
        reason: &'a str,
    },
    /// The receiver has closed its end.
    Gone {
        /// How many items it has taken.
        items: u64,
    },
}

impl<'a> ToSender<'a> {
    /// Appends the frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = match self {
            Self::Place { seq, region, offset } => {
                let start = begin(out, PLACE);
                words(out, &[*seq, region.0, *offset]);
                start
            }
            Self::Received { items } => {
                let start = begin(out, RECEIVED);
                words(out, &[*items]);
                start
            }
            Self::Refused { kind, reason } => {
                let start = begin(out, REFUSED);
                words(out, &[*kind as u64]);
                text(out, reason);
                start
            }
            Self::Gone { items } => {
                let start = begin(out, GONE);
                words(out, &[*items]);
                start
            }
        };
        finish(out, start, 0);
    }

    /// The frame at the start of `input` and its bytes; `None` when more must come first.
    ///
    /// # Errors
    /// `Integrity` for anything that [`encode`](Self::encode) doesn't write.
    pub fn decode(input: &'a [u8]) -> Result<Option<(Self, usize)>> {
        let bounds = |kind| match kind {
            PLACE => Some((24, 24)),
            RECEIVED | GONE => Some((8, 8)),
            REFUSED => Some((8, 8 + MAX_TEXT)),
            _ => None,
        };
        let Some((kind, body, used)) = split(input, bounds)? else {
            return Ok(None);
        };
        let frame = match kind {
            PLACE => Self::Place {
                seq: word(body, 0),
                region: RegionId(word(body, 8)),
                offset: word(body, 16),
            },
            RECEIVED => Self::Received { items: word(body, 0) },
            GONE => Self::Gone { items: word(body, 0) },
            _ => Self::Refused {
                kind: kind_of(word(body, 0))?,
                reason: string(&body[8..])?,
            },
        };
        Ok(Some((frame, used)))
    }

    /// The name in messages about frames that came at the wrong time.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Place { .. } => "place",
            Self::Received { .. } => "received",
            Self::Refused { .. } => "refused",
            Self::Gone { .. } => "gone",
        }
    }
}
