//! Transfer messages to and from the schema. Decoding is where every stateless check happens.

use core::time::Duration;

use super::message::{
    Abandon, Ack, Claim, ClaimStatus, Done, Fault, Goodbye, Grant, Message, Nack, Notify, Ping, Pong, Refuse, Reject,
    Renew, Renewed, Revoke, Status, StatusReply, Unknown,
};
use super::schema::{self, Envelope, Kind};
use super::{MAX_FAULT_TEXT, MAX_NOTIFY, MAX_TEXT, violation};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{CacheId, ExportId, Incarnation, TransferId};
use crate::plan::WireOrder;
use crate::reference::{ExportKind, Reference};

impl From<&Message> for Envelope {
    fn from(message: &Message) -> Self {
        let kind = match message {
            Message::Hello(m) => Kind::Hello(m.as_ref().into()),
            Message::HelloAck(m) => Kind::HelloAck(m.as_ref().into()),
            Message::HandshakeRefusal(m) => Kind::HandshakeRefusal(m.into()),
            Message::StreamHello(m) => Kind::StreamHello(m.into()),
            Message::Advertise(m) => Kind::Advertise(m.into()),
            Message::Withdraw(m) => Kind::Withdraw(m.into()),
            Message::Claim(m) => Kind::Claim(m.as_ref().into()),
            Message::Grant(m) => Kind::Grant(schema::Grant {
                transfer: m.transfer.0,
                cache: m.cache.0,
                num_blocks: m.num_blocks,
                table: m.blocks.as_ref().map(Into::into),
                remaining_ms: millis(m.remaining),
            }),
            Message::Refuse(m) => Kind::Refuse(transfer_fault(m.transfer, &m.fault)),
            Message::Done(m) => Kind::Done(schema::Done {
                transfer: m.transfer.0,
                bytes: m.bytes,
            }),
            Message::Ack(m) => Kind::Ack(schema::TransferOnly { transfer: m.transfer.0 }),
            Message::Nack(m) => Kind::Nack(transfer_fault(m.transfer, &m.fault)),
            Message::Abandon(m) => Kind::Abandon(schema::Abandon {
                transfer: m.transfer.0,
                code: m.reason as u32,
            }),
            Message::Revoke(m) => Kind::Revoke(transfer_fault(m.transfer, &m.fault)),
            Message::Renew(m) => Kind::Renew(schema::Renew {
                request: m.request,
                reference: Some((&m.reference).into()),
                extend_ms: millis(m.extend),
            }),
            Message::Renewed(m) => Kind::Renewed(schema::Renewed {
                request: m.request,
                remaining_ms: m.result.as_ref().map_or(0, |d| millis(*d)),
                fault: m.result.as_ref().err().map(Into::into),
            }),
            Message::Reject(m) => Kind::Reject(schema::Reject {
                reference: Some((&m.reference).into()),
                consumer: m.consumer,
            }),
            Message::Status(m) => Kind::Status(schema::TransferOnly { transfer: m.transfer.0 }),
            Message::StatusReply(m) => {
                let (status, fault) = match &m.status {
                    ClaimStatus::Unknown => (0, None),
                    ClaimStatus::Active => (1, None),
                    ClaimStatus::Completed => (2, None),
                    ClaimStatus::Failed(fault) => (3, Some(fault.into())),
                };
                Kind::StatusReply(schema::StatusReply {
                    transfer: m.transfer.0,
                    status,
                    fault,
                })
            }
            Message::Notify(m) => Kind::Notify(schema::Notify { bytes: m.bytes.clone() }),
            Message::Ping(m) => Kind::Ping(schema::Sequence { sequence: m.sequence }),
            Message::Pong(m) => Kind::Pong(schema::Sequence { sequence: m.sequence }),
            Message::Goodbye(m) => Kind::Goodbye(schema::Goodbye { reason: cut(&m.reason) }),
            Message::Unknown(m) => {
                return Self {
                    critical: m.critical,
                    kind: None,
                };
            }
        };
        Self {
            critical: false,
            kind: Some(kind),
        }
    }
}

impl TryFrom<Envelope> for Message {
    type Error = Error;

    fn try_from(envelope: Envelope) -> Result<Self> {
        let Some(kind) = envelope.kind else {
            return Ok(Self::Unknown(Unknown {
                critical: envelope.critical,
            }));
        };
        Ok(match kind {
            Kind::Hello(m) => Self::Hello(Box::new(m.try_into()?)),
            Kind::HelloAck(m) => Self::HelloAck(Box::new(m.try_into()?)),
            Kind::HandshakeRefusal(m) => Self::HandshakeRefusal(m.try_into()?),
            Kind::StreamHello(m) => Self::StreamHello(m.try_into()?),
            Kind::Advertise(m) => Self::Advertise(m.try_into()?),
            Kind::Withdraw(m) => Self::Withdraw(m.try_into()?),
            Kind::Claim(m) => Self::Claim(Box::new(m.try_into()?)),
            Kind::Grant(m) => Self::Grant(m.try_into()?),
            Kind::Refuse(m) => {
                let (transfer, fault) = split(m)?;
                Self::Refuse(Refuse { transfer, fault })
            }
            Kind::Done(m) => Self::Done(Done {
                transfer: TransferId(m.transfer),
                bytes: m.bytes,
            }),
            Kind::Ack(m) => Self::Ack(Ack {
                transfer: TransferId(m.transfer),
            }),
            Kind::Nack(m) => {
                let (transfer, fault) = split(m)?;
                Self::Nack(Nack { transfer, fault })
            }
            Kind::Abandon(m) => Self::Abandon(Abandon {
                transfer: TransferId(m.transfer),
                reason: ErrorKind::from_code(m.code),
            }),
            Kind::Revoke(m) => {
                let (transfer, fault) = split(m)?;
                Self::Revoke(Revoke { transfer, fault })
            }
            Kind::Renew(m) => Self::Renew(Box::new(Renew {
                request: m.request,
                reference: present(m.reference, "renew.reference")?.try_into()?,
                extend: Duration::from_millis(m.extend_ms),
            })),
            Kind::Renewed(m) => Self::Renewed(Renewed {
                request: m.request,
                result: match m.fault {
                    Some(fault) => Err(fault.try_into()?),
                    None => Ok(Duration::from_millis(m.remaining_ms)),
                },
            }),
            Kind::Reject(m) => Self::Reject(Box::new(Reject {
                reference: present(m.reference, "reject.reference")?.try_into()?,
                consumer: m.consumer,
            })),
            Kind::Status(m) => Self::Status(Status {
                transfer: TransferId(m.transfer),
            }),
            Kind::StatusReply(m) => {
                let status = match m.status {
                    0 => ClaimStatus::Unknown,
                    1 => ClaimStatus::Active,
                    2 => ClaimStatus::Completed,
                    3 => ClaimStatus::Failed(present(m.fault, "status_reply.fault")?.try_into()?),
                    other => {
                        return Err(violation(format!(
                            "field `status_reply.status` holds `{other}`, at most `3` is defined"
                        )));
                    }
                };
                Self::StatusReply(StatusReply {
                    transfer: TransferId(m.transfer),
                    status,
                })
            }
            Kind::Notify(m) => {
                if m.bytes.len() > MAX_NOTIFY {
                    return Err(violation(format!(
                        "notification of `{}` bytes, at most `{MAX_NOTIFY}` are allowed",
                        m.bytes.len()
                    )));
                }
                Self::Notify(Notify { bytes: m.bytes })
            }
            Kind::Ping(m) => Self::Ping(Ping { sequence: m.sequence }),
            Kind::Pong(m) => Self::Pong(Pong { sequence: m.sequence }),
            Kind::Goodbye(m) => Self::Goodbye(Goodbye {
                reason: limited(m.reason, "goodbye.reason", MAX_FAULT_TEXT)?,
            }),
        })
    }
}

impl From<&Claim> for schema::Claim {
    fn from(m: &Claim) -> Self {
        Self {
            transfer: m.transfer.0,
            reference: Some((&m.reference).into()),
            expected_digest: m.expected_digest.clone(),
            expected_fingerprint: m.expected_fingerprint.to_vec(),
            first_block: m.first_block,
            num_blocks: m.num_blocks,
            first_layer: m.first_layer,
            num_layers: m.num_layers,
            transport: m.transport.clone(),
            remaining_ms: millis(m.remaining),
            wants_table: m.wants_table,
            order: m.order.map(|order| order.code()),
        }
    }
}

impl TryFrom<schema::Claim> for Claim {
    type Error = Error;

    fn try_from(m: schema::Claim) -> Result<Self> {
        Ok(Self {
            transfer: TransferId(m.transfer),
            reference: present(m.reference, "claim.reference")?.try_into()?,
            expected_digest: match m.expected_digest {
                Some(digest) if digest.len() > crate::reference::MAX_DIGEST => {
                    return Err(violation(format!(
                        "field `claim.expected_digest` holds `{}` bytes",
                        digest.len()
                    )));
                }
                digest => digest,
            },
            expected_fingerprint: sized(&m.expected_fingerprint, "claim.expected_fingerprint")?,
            first_block: m.first_block,
            num_blocks: m.num_blocks,
            first_layer: m.first_layer,
            num_layers: m.num_layers,
            transport: limited(m.transport, "claim.transport", 64)?,
            remaining: Duration::from_millis(m.remaining_ms),
            wants_table: m.wants_table,
            order: match m.order {
                None => None,
                Some(code) => Some(
                    WireOrder::from_code(code)
                        .map_err(|e| violation("field `claim.order` is not an order").with_source(e))?,
                ),
            },
        })
    }
}

impl TryFrom<schema::Grant> for Grant {
    type Error = Error;

    fn try_from(m: schema::Grant) -> Result<Self> {
        let blocks = match m.table {
            None => None,
            Some(table) => Some(super::table::decode(&table, m.num_blocks)?),
        };
        Ok(Self {
            transfer: TransferId(m.transfer),
            cache: CacheId(m.cache),
            num_blocks: m.num_blocks,
            blocks,
            remaining: Duration::from_millis(m.remaining_ms),
        })
    }
}

impl From<&Reference> for schema::Reference {
    fn from(r: &Reference) -> Self {
        Self {
            version: r.version,
            kind: r.kind.code(),
            engine: r.engine.clone(),
            address: r.address.clone(),
            incarnation: r.incarnation.as_bytes().to_vec(),
            export_id: r.export_id.as_bytes().to_vec(),
            cache: r.cache.0,
            digest: r.digest.clone(),
            fingerprint: r.fingerprint.to_vec(),
            num_tokens: r.num_tokens,
            num_blocks: r.num_blocks,
            consumers: r.consumers,
            tag: r.tag.to_vec(),
        }
    }
}

impl TryFrom<schema::Reference> for Reference {
    type Error = Error;

    /// Only the shape is checked here: an altered value must reach the owner's check, which answers
    /// with a refusal instead of dropping the channel.
    fn try_from(r: schema::Reference) -> Result<Self> {
        let reference = Self {
            version: r.version,
            kind: ExportKind::from_code(r.kind)
                .ok_or_else(|| violation(format!("field `reference.kind` holds `{}`", r.kind)))?,
            engine: r.engine,
            address: r.address,
            incarnation: Incarnation::new(sized(&r.incarnation, "reference.incarnation")?),
            export_id: ExportId::new(sized(&r.export_id, "reference.export_id")?),
            cache: CacheId(r.cache),
            digest: r.digest,
            fingerprint: sized(&r.fingerprint, "reference.fingerprint")?,
            num_tokens: r.num_tokens,
            num_blocks: r.num_blocks,
            consumers: r.consumers,
            tag: sized(&r.tag, "reference.tag")?,
        };
        let longest = reference
            .engine
            .len()
            .max(reference.address.len())
            .max(reference.digest.len());
        if longest > MAX_TEXT {
            return Err(violation(format!(
                "a field of `reference` holds `{longest}` bytes, at most `{MAX_TEXT}` are allowed"
            )));
        }
        Ok(reference)
    }
}

impl From<&Fault> for schema::Fault {
    fn from(fault: &Fault) -> Self {
        Self {
            code: fault.kind as u32,
            message: cut(&fault.message),
            hint: cut(&fault.hint),
        }
    }
}

impl TryFrom<schema::Fault> for Fault {
    type Error = Error;

    fn try_from(m: schema::Fault) -> Result<Self> {
        Ok(Self {
            kind: ErrorKind::from_code(m.code),
            message: limited(m.message, "fault.message", MAX_FAULT_TEXT)?,
            hint: limited(m.hint, "fault.hint", MAX_FAULT_TEXT)?,
        })
    }
}

fn transfer_fault(transfer: TransferId, fault: &Fault) -> schema::TransferFault {
    schema::TransferFault {
        transfer: transfer.0,
        fault: Some(fault.into()),
    }
}

fn split(m: schema::TransferFault) -> Result<(TransferId, Fault)> {
    Ok((TransferId(m.transfer), present(m.fault, "fault")?.try_into()?))
}

/// Whole milliseconds, rounded down: the receiver must never think it has more time than it has.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The text as far as the receiver accepts it.
fn cut(text: &str) -> String {
    let mut end = text.len().min(MAX_FAULT_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

pub(super) fn present<T>(value: Option<T>, field: &str) -> Result<T> {
    value.ok_or_else(|| violation(format!("field `{field}` is missing")))
}

pub(super) fn sized<const N: usize>(bytes: &[u8], field: &str) -> Result<[u8; N]> {
    bytes
        .try_into()
        .map_err(|_| violation(format!("field `{field}` holds `{}` bytes, not `{N}`", bytes.len())))
}

pub(super) fn limited(text: String, field: &str, cap: usize) -> Result<String> {
    if text.len() > cap {
        return Err(violation(format!(
            "field `{field}` holds `{}` bytes, at most `{cap}` are allowed",
            text.len()
        )));
    }
    Ok(text)
}
