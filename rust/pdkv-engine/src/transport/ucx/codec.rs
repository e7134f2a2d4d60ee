//! The frames on a lane's side channel: what two ends tell each other so that UCX can carry the payload.
//!
//! A header of 16 bytes and a body whose size the kind bounds, little-endian, checked field by field. No
//! payload and no address that is used here crosses this channel: addresses and keys in it are the
//! sender's own, and are used to reach into the sender.

use pdkv_core::id::RegionId;
use pdkv_core::lane::{Carrier, Manner};
use pdkv_core::{Error, ErrorKind, Result};

use crate::transport::request::{MAX_SPANS, Request, Target, WireSpan, garbage, word32, word64};

/// Bytes of a packed key or a worker's address; real ones have tens or hundreds.
pub(crate) const MAX_BLOB: usize = 64 << 10;
/// Bytes of a text.
pub(crate) const MAX_TEXT: usize = 4096;
/// Bytes of a header.
pub(crate) const HEADER: usize = 16;

pub(super) const MAGIC: u32 = 0x5544_4B50; // "PKDU"

/// How UCX is to treat the failure of a peer; chosen by the initiator for both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It need not notice: shared memory and kernel copies are possible.
    None,
    /// It notices: what RDMA lanes run with.
    Peer,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// Initiator: let us make a lane like this; here is my worker.
    Offer {
        manner: Manner,
        mode: Mode,
        address: Vec<u8>,
    },
    /// Owner: here is mine. One-sided, with memory to try a put on: where it lies and its key.
    Accept { base: u64, address: Vec<u8>, key: Vec<u8> },
    /// Either: not in this manner, and why. `last`: and in no other.
    Decline { last: bool, reason: String },
    /// Initiator: UCX says that the put went like this.
    Verdict { carrier: Carrier, text: String },
    /// Owner: agreed.
    Ready,
    /// Initiator: what do I need to reach this region?
    WantKey { region: RegionId },
    /// Owner: this.
    Key {
        region: RegionId,
        base: u64,
        len: u64,
        key: Vec<u8>,
    },
    /// Owner: nothing; the region isn't yours to reach.
    NoKey { region: RegionId, reason: String },
    /// Initiator: send me these bytes, or take them.
    Ask { id: u64, request: Request, spans: Vec<u8> },
    /// Owner: I will take them, send.
    Go { id: u64 },
    /// Initiator: they won't come.
    Never { id: u64 },
    /// Owner: taken (`code` 0), or refused.
    Answer {
        id: u64,
        code: u16,
        bytes: u64,
        text: String,
    },
    /// Initiator: have the GPU of this region see what was put there; all of it has arrived.
    Land { id: u64, region: RegionId },
    /// Owner: it sees it (no reason), or why not.
    Landed { id: u64, reason: String },
}

impl Frame {
    fn kind(&self) -> u8 {
        match self {
            Self::Offer { .. } => 1,
            Self::Accept { .. } => 2,
            Self::Decline { .. } => 3,
            Self::Verdict { .. } => 4,
            Self::Ready => 5,
            Self::WantKey { .. } => 6,
            Self::Key { .. } => 7,
            Self::NoKey { .. } => 8,
            Self::Ask { .. } => 9,
            Self::Go { .. } => 10,
            Self::Never { .. } => 11,
            Self::Answer { .. } => 12,
            Self::Land { .. } => 13,
            Self::Landed { .. } => 14,
        }
    }

    /// The name in messages about frames that came at the wrong time.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Offer { .. } => "offer",
            Self::Accept { .. } => "accept",
            Self::Decline { .. } => "decline",
            Self::Verdict { .. } => "verdict",
            Self::Ready => "ready",
            Self::WantKey { .. } => "want_key",
            Self::Key { .. } => "key",
            Self::NoKey { .. } => "no_key",
            Self::Ask { .. } => "ask",
            Self::Go { .. } => "go",
            Self::Never { .. } => "never",
            Self::Answer { .. } => "answer",
            Self::Land { .. } => "land",
            Self::Landed { .. } => "landed",
        }
    }

    /// Appends the frame to `out`.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&[self.kind(), 0, 0, 0]);
        out.extend_from_slice(&[0; 8]);
        match self {
            Self::Offer { manner, mode, address } => {
                let (manner, mode) = (*manner == Manner::ActiveMessages, *mode == Mode::Peer);
                out.extend_from_slice(&[u8::from(manner), u8::from(mode), 0, 0, 0, 0, 0, 0]);
                out.extend_from_slice(address);
            }
            Self::Accept { base, address, key } => {
                words(out, &[*base, address.len() as u64]);
                out.extend_from_slice(address);
                out.extend_from_slice(key);
            }
            Self::Decline { last, reason } => {
                words(out, &[u64::from(*last)]);
                text(out, reason);
            }
            Self::Verdict { carrier, text: said } => {
                words(out, &[*carrier as u64]);
                text(out, said);
            }
            Self::Ready => {}
            Self::WantKey { region } => words(out, &[region.0]),
            Self::Key { region, base, len, key } => {
                words(out, &[region.0, *base, *len]);
                out.extend_from_slice(key);
            }
            Self::NoKey { region, reason } => {
                words(out, &[region.0]);
                text(out, reason);
            }
            Self::Ask { id, request, spans } => {
                words(out, &[*id]);
                out.extend_from_slice(&request.encode());
                out.extend_from_slice(spans);
            }
            Self::Go { id } | Self::Never { id } => words(out, &[*id]),
            Self::Answer {
                id,
                code,
                bytes,
                text: said,
            } => {
                words(out, &[*id, u64::from(*code), *bytes]);
                text(out, said);
            }
            Self::Land { id, region } => words(out, &[*id, region.0]),
            Self::Landed { id, reason } => {
                words(out, &[*id]);
                text(out, reason);
            }
        }
        let body = (out.len() - start - HEADER) as u32;
        out[start + 8..start + 12].copy_from_slice(&body.to_le_bytes());
    }

    /// The bytes of the body that follows a header, and its kind.
    ///
    /// # Errors
    /// `Integrity` for a header that [`encode`](Self::encode) doesn't write, one that announces too much
    /// above all.
    pub(crate) fn header(raw: &[u8; HEADER]) -> Result<(u8, usize)> {
        if word32(raw, 0) != MAGIC {
            return Err(garbage("lane magic", u64::from(word32(raw, 0))));
        }
        if raw[5..8] != [0; 3] || word32(raw, 12) != 0 {
            return Err(garbage("reserved bytes", u64::from(word32(raw, 12))));
        }
        let (kind, len) = (raw[4], word32(raw, 8) as usize);
        let (least, most) = match kind {
            1 => (8, 8 + MAX_BLOB),
            2 => (16, 16 + 2 * MAX_BLOB),
            3 | 4 | 8 | 14 => (8, 8 + MAX_TEXT),
            5 => (0, 0),
            6 | 10 | 11 => (8, 8),
            7 => (24, 24 + MAX_BLOB),
            9 => (8 + Request::SIZE, 8 + Request::SIZE + MAX_SPANS * WireSpan::SIZE),
            12 => (24, 24 + MAX_TEXT),
            13 => (16, 16),
            _ => return Err(garbage("lane frame", u64::from(kind))),
        };
        if !(least..=most).contains(&len) {
            return Err(garbage("lane body length", len as u64));
        }
        Ok((kind, len))
    }

    /// Reads the body of a frame whose header was found good.
    ///
    /// # Errors
    /// `Integrity` for anything that [`encode`](Self::encode) doesn't write.
    pub(crate) fn body(kind: u8, raw: &[u8]) -> Result<Self> {
        let word = |at: usize| word64(raw, at);
        Ok(match kind {
            1 => {
                if raw[2..8] != [0; 6] {
                    return Err(garbage("reserved bytes", word(0)));
                }
                Self::Offer {
                    manner: match raw[0] {
                        0 => Manner::OneSided,
                        1 => Manner::ActiveMessages,
                        other => return Err(garbage("manner", u64::from(other))),
                    },
                    mode: match raw[1] {
                        0 => Mode::None,
                        1 => Mode::Peer,
                        other => return Err(garbage("error mode", u64::from(other))),
                    },
                    address: raw[8..].to_vec(),
                }
            }
            2 => {
                let rest = &raw[16..];
                let at = usize::try_from(word(8)).unwrap_or(usize::MAX);
                let fits = at <= MAX_BLOB && rest.len().checked_sub(at).is_some_and(|key| key <= MAX_BLOB);
                if !fits {
                    return Err(garbage("address length", word(8)));
                }
                Self::Accept {
                    base: word(0),
                    address: rest[..at].to_vec(),
                    key: rest[at..].to_vec(),
                }
            }
            3 => Self::Decline {
                last: match word(0) {
                    0 => false,
                    1 => true,
                    other => return Err(garbage("finality", other)),
                },
                reason: string(&raw[8..])?,
            },
            4 => Self::Verdict {
                carrier: [Carrier::Rdma, Carrier::Kernel, Carrier::Emulated]
                    .into_iter()
                    .find(|&carrier| carrier as u64 == word(0))
                    .ok_or_else(|| garbage("carrier", word(0)))?,
                text: string(&raw[8..])?,
            },
            5 => Self::Ready,
            6 => Self::WantKey {
                region: RegionId(word(0)),
            },
            7 => Self::Key {
                region: RegionId(word(0)),
                base: word(8),
                len: word(16),
                key: raw[24..].to_vec(),
            },
            8 => Self::NoKey {
                region: RegionId(word(0)),
                reason: string(&raw[8..])?,
            },
            9 => ask(word(0), &raw[8..])?,
            10 => Self::Go { id: word(0) },
            11 => Self::Never { id: word(0) },
            12 => Self::Answer {
                id: word(0),
                code: u16::try_from(word(8)).map_err(|_| garbage("error code", word(8)))?,
                bytes: word(16),
                text: string(&raw[24..])?,
            },
            13 => Self::Land {
                id: word(0),
                region: RegionId(word(8)),
            },
            14 => Self::Landed {
                id: word(0),
                reason: string(&raw[8..])?,
            },
            _ => return Err(garbage("lane frame", u64::from(kind))),
        })
    }
}

fn ask(id: u64, raw: &[u8]) -> Result<Frame> {
    let mut head = [0; Request::SIZE];
    head.copy_from_slice(&raw[..Request::SIZE]);
    let request = Request::decode(&head)?;
    let spans = &raw[Request::SIZE..];
    let count = match request.target {
        Target::Claim { .. } => 0,
        Target::Spans { count } => count as usize,
    };
    if spans.len() != count * WireSpan::SIZE {
        return Err(garbage("bytes of spans", spans.len() as u64));
    }
    Ok(Frame::Ask {
        id,
        request,
        spans: spans.to_vec(),
    })
}

fn words(out: &mut Vec<u8>, words: &[u64]) {
    for word in words {
        out.extend_from_slice(&word.to_le_bytes());
    }
}

/// Appends a text of ours, cut to what may be sent.
fn text(out: &mut Vec<u8>, said: &str) {
    let mut end = said.len().min(MAX_TEXT);
    while !said.is_char_boundary(end) {
        end -= 1;
    }
    out.extend_from_slice(&said.as_bytes()[..end]);
}

fn string(raw: &[u8]) -> Result<String> {
    let text = std::str::from_utf8(raw).map_err(|_| garbage("text of", raw.len() as u64))?;
    Ok(text.to_owned())
}

/// The error of a frame that came when it makes no sense.
pub(crate) fn misplaced(frame: &Frame) -> Error {
    Error::new(
        ErrorKind::Integrity,
        "lane",
        format!("the peer sent `{}` at the wrong time", frame.name()),
    )
}
