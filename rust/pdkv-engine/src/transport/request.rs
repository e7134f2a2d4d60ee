//! What an initiator asks of the owner of memory, on a data stream of `tcp` and on the side channel of a
//! lane of `ucx`: units of a granted claim, or raw spans. No address crosses the wire. Little-endian,
//! fixed size, checked field by field.

use std::ops::{ControlFlow, Range};

use pdkv_core::id::{RegionId, TransferId};
use pdkv_core::plan::Plan;
use pdkv_core::{Error, ErrorKind, Result};

use super::{Direction, Work};

/// Spans one request may name.
pub(crate) const MAX_SPANS: usize = 1024;
/// Payload bytes one request may ask for.
pub(crate) const MAX_PAYLOAD: u64 = 1 << 32;

const REQUEST_MAGIC: u32 = 0x5144_4B50; // "PKDQ"

/// What the initiator wants of the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// Send me the bytes.
    Get,
    /// Take these bytes.
    Put,
}

impl From<Direction> for Verb {
    fn from(direction: Direction) -> Self {
        match direction {
            Direction::Read => Self::Get,
            Direction::Write => Self::Put,
        }
    }
}

/// How the bytes are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Units of a granted claim.
    Claim {
        transfer: TransferId,
        first_unit: u64,
        units: u64,
    },
    /// This many spans, which follow the header.
    Spans { count: u32 },
}

/// The fixed part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) verb: Verb,
    pub(crate) target: Target,
    /// Payload bytes of this request, as the initiator counts them.
    pub(crate) bytes: u64,
}

impl Request {
    pub(crate) const SIZE: usize = 40;

    pub(crate) fn encode(&self) -> [u8; Self::SIZE] {
        let (kind, transfer, first, units) = match self.target {
            Target::Claim {
                transfer,
                first_unit,
                units,
            } => (0_u8, transfer.0, first_unit, units),
            Target::Spans { count } => (1, 0, 0, u64::from(count)),
        };
        let mut out = [0; Self::SIZE];
        out[0..4].copy_from_slice(&REQUEST_MAGIC.to_le_bytes());
        out[4] = u8::from(self.verb == Verb::Put);
        out[5] = kind;
        out[8..16].copy_from_slice(&transfer.to_le_bytes());
        out[16..24].copy_from_slice(&first.to_le_bytes());
        out[24..32].copy_from_slice(&units.to_le_bytes());
        out[32..40].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    /// # Errors
    /// `Integrity` for anything that [`encode`](Self::encode) doesn't write.
    pub(crate) fn decode(raw: &[u8; Self::SIZE]) -> Result<Self> {
        let verb = match raw[4] {
            0 => Verb::Get,
            1 => Verb::Put,
            other => return Err(garbage("verb", u64::from(other))),
        };
        if word32(raw, 0) != REQUEST_MAGIC {
            return Err(garbage("request magic", u64::from(word32(raw, 0))));
        }
        if raw[6] != 0 || raw[7] != 0 {
            return Err(garbage("reserved bytes", u64::from(raw[6]) << 8 | u64::from(raw[7])));
        }
        let (units, bytes) = (word64(raw, 24), word64(raw, 32));
        if bytes > MAX_PAYLOAD {
            return Err(garbage("payload bytes", bytes));
        }
        let target = match raw[5] {
            0 => Target::Claim {
                transfer: TransferId(word64(raw, 8)),
                first_unit: word64(raw, 16),
                units,
            },
            1 if units as usize <= MAX_SPANS && word64(raw, 8) == 0 && word64(raw, 16) == 0 => {
                Target::Spans { count: units as u32 }
            }
            1 => return Err(garbage("span count", units)),
            other => return Err(garbage("target", u64::from(other))),
        };
        Ok(Self { verb, target, bytes })
    }
}

/// A range of one of the owner's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WireSpan {
    pub(crate) region: RegionId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl WireSpan {
    pub(crate) const SIZE: usize = 24;

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.region.0.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
    }

    pub(crate) fn decode(raw: &[u8]) -> Self {
        Self {
            region: RegionId(word64(raw, 0)),
            offset: word64(raw, 8),
            len: word64(raw, 16),
        }
    }
}

/// Appends the spans of some units of a plan as the owner knows them; gives how many they are, and their bytes.
pub(crate) fn encode_spans(work: &Work, plan: &Plan, units: Range<u64>, out: &mut Vec<u8>) -> (u32, u64) {
    let (mut count, mut bytes) = (0_u32, 0);
    let flow = plan.walk(units, |run| {
        let far = match work.direction {
            Direction::Read => run.src,
            Direction::Write => run.dst,
        };
        let span = WireSpan {
            region: work.remote[far.region as usize].id,
            offset: far.offset,
            len: run.len,
        };
        span.encode(out);
        count += 1;
        bytes += run.len;
        ControlFlow::Continue(())
    });
    debug_assert!(flow.is_continue());
    (count, bytes)
}

/// The little-endian word at `at`.
pub(crate) fn word32(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]])
}

/// As [`word32`], twice as long.
pub(crate) fn word64(raw: &[u8], at: usize) -> u64 {
    u64::from(word32(raw, at)) | u64::from(word32(raw, at + 4)) << 32
}

/// The refusal of a header.
pub(crate) fn garbage(what: &str, value: u64) -> Error {
    Error::new(
        ErrorKind::Integrity,
        "data stream",
        format!("a header carries the {what} `{value:#x}`"),
    )
    .with_hint("something else than pdkv talks on this stream, or the two ends lost step")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_request_that_encodes_to_them_or_to_a_refusal(mut raw in any::<[u8; Request::SIZE]>(), near in any::<bool>()) {
            if near {
                raw[0..4].copy_from_slice(&REQUEST_MAGIC.to_le_bytes());
                raw[4] &= 1;
                raw[5] &= 1;
                raw[6] = 0;
                raw[7] = 0;
            }
            if let Ok(request) = Request::decode(&raw) {
                prop_assert_eq!(request.encode(), raw);
            }
        }
    }

    #[test]
    fn requests_come_back() {
        let claim = Target::Claim {
            transfer: TransferId(7),
            first_unit: 1 << 40,
            units: 3,
        };
        for target in [claim, Target::Spans { count: 1024 }] {
            for verb in [Verb::Get, Verb::Put] {
                let request = Request {
                    verb,
                    target,
                    bytes: 4096,
                };
                assert_eq!(Request::decode(&request.encode()).unwrap(), request);
            }
        }
        let too_many = Request {
            verb: Verb::Get,
            target: Target::Spans { count: 1025 },
            bytes: 1,
        };
        assert_eq!(
            Request::decode(&too_many.encode()).unwrap_err().kind(),
            ErrorKind::Integrity
        );
    }
}
