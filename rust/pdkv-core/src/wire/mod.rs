//! The wire: typed messages, their prost schema and the framing of the control channel.
//!
//! A frame is a little-endian `u32` length and one envelope. What is decoded here is checked as far
//! as that needs no state: sizes, ids, enum codes, layouts, references. Hostile bytes give an error,
//! never a panic and never an allocation beyond the frame they came in.

mod convert;
mod convert_hello;
mod frame;
mod hello;
mod message;
mod schema;
mod table;

pub(crate) use table::table_fits;

pub use frame::{FrameDecoder, HELLO_CAP, MAX_FRAME, encode};
pub use hello::{
    CacheAdvert, DeviceAdvert, HandshakeRefusal, Hello, HelloAck, HostFacts, Probe, RegionAdvert, SharedExtent,
    StreamHello, StreamPurpose,
};
pub use message::{
    Abandon, Ack, Advertise, Claim, ClaimStatus, Done, Fault, Goodbye, Grant, Message, Nack, Notify, Ping, Pong,
    Refuse, Reject, Renew, Renewed, Revoke, Status, StatusReply, Unknown, Withdraw,
};

/// First bytes of every hello, so that a stranger's protocol is told from a version of ours.
pub const MAGIC: &str = "pdkv";
/// Most bytes of one notification.
pub const MAX_NOTIFY: usize = 1 << 20;
/// Longest name, address or model text in a message.
pub const MAX_TEXT: usize = 1024;
/// Longest error text in a message; what is longer is cut by the sender.
pub const MAX_FAULT_TEXT: usize = 4096;
/// Most regions, caches or ids in one message.
pub const MAX_ADVERTS: usize = 1 << 16;

pub(crate) fn violation(message: impl Into<String>) -> crate::Error {
    crate::Error::new(crate::ErrorKind::Handshake, "decode message", message)
}
