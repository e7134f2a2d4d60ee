//! The wire schema: prost messages with fixed tags. A tag never changes its meaning; what a release
//! doesn't know it skips. Only `convert*` uses these types.

#![allow(missing_docs)] // the fields mirror `message` and `hello`, where they are documented

use prost::{Message, Oneof};

macro_rules! schema {
    ($( $name:ident { $( $(#[$attr:meta])* $field:ident: $ty:ty ),* $(,)? } )+) => { $(
        #[derive(Clone, PartialEq, Message)]
        pub(super) struct $name { $( $(#[$attr])* pub $field: $ty, )* }
    )+ };
}

schema! {
    Envelope {
        #[prost(bool, tag = "1")] critical: bool,
        #[prost(oneof = "Kind", tags = "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24")]
        kind: Option<Kind>,
    }
}

/// Tag of the only kind whose frames may be large.
pub(super) const GRANT_TAG: u32 = 9;

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Kind {
    #[prost(message, tag = "2")]
    Hello(Hello),
    #[prost(message, tag = "3")]
    HelloAck(HelloAck),
    #[prost(message, tag = "4")]
    HandshakeRefusal(Fault),
    #[prost(message, tag = "5")]
    StreamHello(StreamHello),
    #[prost(message, tag = "6")]
    Advertise(Advertise),
    #[prost(message, tag = "7")]
    Withdraw(Withdraw),
    #[prost(message, tag = "8")]
    Claim(Claim),
    #[prost(message, tag = "9")]
    Grant(Grant),
    #[prost(message, tag = "10")]
    Refuse(TransferFault),
    #[prost(message, tag = "11")]
    Done(Done),
    #[prost(message, tag = "12")]
    Ack(TransferOnly),
    #[prost(message, tag = "13")]
    Nack(TransferFault),
    #[prost(message, tag = "14")]
    Abandon(Abandon),
    #[prost(message, tag = "15")]
    Revoke(TransferFault),
    #[prost(message, tag = "16")]
    Renew(Renew),
    #[prost(message, tag = "17")]
    Renewed(Renewed),
    #[prost(message, tag = "18")]
    Reject(Reject),
    #[prost(message, tag = "19")]
    Status(TransferOnly),
    #[prost(message, tag = "20")]
    StatusReply(StatusReply),
    #[prost(message, tag = "21")]
    Notify(Notify),
    #[prost(message, tag = "22")]
    Ping(Sequence),
    #[prost(message, tag = "23")]
    Pong(Sequence),
    #[prost(message, tag = "24")]
    Goodbye(Goodbye),
}

schema! {
    Hello {
        #[prost(string, tag = "1")] magic: String,
        #[prost(uint32, tag = "2")] min_version: u32,
        #[prost(uint32, tag = "3")] max_version: u32,
        #[prost(fixed64, tag = "4")] features: u64,
        #[prost(string, tag = "5")] name: String,
        #[prost(bytes = "vec", tag = "6")] incarnation: Vec<u8>,
        #[prost(string, tag = "7")] address: String,
        #[prost(uint32, tag = "8")] pid: u32,
        #[prost(string, tag = "9")] boot_id: String,
        #[prost(uint64, tag = "10")] pid_namespace: u64,
        #[prost(string, tag = "11")] local_socket: String,
        #[prost(message, optional, tag = "12")] probe: Option<Probe>,
        #[prost(uint64, tag = "13")] peer_timeout_ms: u64,
        #[prost(uint64, tag = "14")] heartbeat_ms: u64,
        #[prost(message, repeated, tag = "15")] regions: Vec<Region>,
        #[prost(message, repeated, tag = "16")] caches: Vec<Cache>,
        #[prost(bytes = "vec", tag = "17")] attempt: Vec<u8>,
    }
    Probe {
        #[prost(fixed64, tag = "1")] address: u64,
        #[prost(bytes = "vec", tag = "2")] nonce: Vec<u8>,
    }
    HelloAck {
        #[prost(message, optional, tag = "1")] hello: Option<Hello>,
        #[prost(uint32, tag = "2")] version: u32,
        #[prost(fixed64, tag = "3")] features: u64,
        #[prost(bytes = "vec", tag = "4")] token: Vec<u8>,
    }
    Region {
        #[prost(uint64, tag = "1")] id: u64,
        #[prost(uint64, tag = "2")] len: u64,
        #[prost(fixed64, tag = "3")] base_address: u64,
        #[prost(message, optional, tag = "4")] shared: Option<Shared>,
        #[prost(bool, tag = "5")] raw_access: bool,
        #[prost(string, tag = "6")] name: String,
        #[prost(message, optional, tag = "7")] device: Option<Device>,
    }
    Device {
        #[prost(bytes = "vec", tag = "1")] uuid: Vec<u8>,
        #[prost(string, tag = "2")] sealed: String,
        #[prost(bool, tag = "3")] movable: bool,
    }
    Shared {
        #[prost(uint64, tag = "1")] offset: u64,
        #[prost(uint64, tag = "2")] len: u64,
    }
    Cache {
        #[prost(uint64, tag = "1")] id: u64,
        #[prost(message, optional, tag = "2")] layout: Option<Layout>,
        #[prost(uint64, repeated, tag = "3")] regions: Vec<u64>,
        #[prost(message, optional, tag = "4")] shard: Option<Shard>,
        #[prost(bytes = "vec", tag = "5")] fingerprint: Vec<u8>,
        #[prost(string, tag = "6")] model: String,
    }
    Layout {
        #[prost(uint32, tag = "1")] dtype: u32,
        #[prost(uint32, tag = "2")] num_blocks: u32,
        #[prost(uint32, tag = "3")] num_heads: u32,
        #[prost(uint32, tag = "4")] block_tokens: u32,
        #[prost(uint64, tag = "5")] content_bytes: u64,
        #[prost(message, repeated, tag = "6")] layers: Vec<Layer>,
        #[prost(uint64, repeated, tag = "7")] region_bytes: Vec<u64>,
        #[prost(uint32, tag = "8")] token_rows: u32,
    }
    Layer {
        #[prost(string, tag = "1")] name: String,
        #[prost(message, repeated, tag = "2")] planes: Vec<Plane>,
        #[prost(uint64, tag = "3")] block_stride: u64,
        #[prost(uint64, tag = "4")] head_stride: u64,
        #[prost(uint64, tag = "5")] token_stride: u64,
    }
    Plane {
        #[prost(uint32, tag = "1")] region: u32,
        #[prost(uint64, tag = "2")] offset: u64,
    }
    Shard {
        #[prost(uint32, tag = "1")] first_layer: u32,
        #[prost(uint32, tag = "2")] num_layers: u32,
        #[prost(uint32, tag = "3")] total_layers: u32,
        #[prost(uint32, tag = "4")] first_head: u32,
        #[prost(uint32, tag = "5")] num_heads: u32,
        #[prost(uint32, tag = "6")] total_heads: u32,
        #[prost(uint32, tag = "7")] tp_rank: u32,
        #[prost(uint32, tag = "8")] tp_size: u32,
        #[prost(uint32, tag = "9")] pp_rank: u32,
        #[prost(uint32, tag = "10")] pp_size: u32,
    }
    StreamHello {
        #[prost(bytes = "vec", tag = "1")] token: Vec<u8>,
        #[prost(bytes = "vec", tag = "2")] incarnation: Vec<u8>,
        #[prost(uint32, tag = "3")] index: u32,
        #[prost(uint32, tag = "4")] purpose: u32,
    }
    Advertise {
        #[prost(message, repeated, tag = "1")] regions: Vec<Region>,
        #[prost(message, repeated, tag = "2")] caches: Vec<Cache>,
    }
    Withdraw {
        #[prost(uint64, repeated, tag = "1")] regions: Vec<u64>,
        #[prost(uint64, repeated, tag = "2")] caches: Vec<u64>,
    }
    Reference {
        #[prost(uint32, tag = "1")] version: u32,
        #[prost(uint32, tag = "2")] kind: u32,
        #[prost(string, tag = "3")] engine: String,
        #[prost(string, tag = "4")] address: String,
        #[prost(bytes = "vec", tag = "5")] incarnation: Vec<u8>,
        #[prost(bytes = "vec", tag = "6")] export_id: Vec<u8>,
        #[prost(uint64, tag = "7")] cache: u64,
        #[prost(bytes = "vec", tag = "8")] digest: Vec<u8>,
        #[prost(bytes = "vec", tag = "9")] fingerprint: Vec<u8>,
        #[prost(uint64, tag = "10")] num_tokens: u64,
        #[prost(uint32, tag = "11")] num_blocks: u32,
        #[prost(uint32, tag = "12")] consumers: u32,
        #[prost(bytes = "vec", tag = "13")] tag: Vec<u8>,
    }
    Claim {
        #[prost(uint64, tag = "1")] transfer: u64,
        #[prost(message, optional, tag = "2")] reference: Option<Reference>,
        #[prost(bytes = "vec", optional, tag = "3")] expected_digest: Option<Vec<u8>>,
        #[prost(bytes = "vec", tag = "4")] expected_fingerprint: Vec<u8>,
        #[prost(uint32, tag = "5")] first_block: u32,
        #[prost(uint32, tag = "6")] num_blocks: u32,
        #[prost(uint32, tag = "7")] first_layer: u32,
        #[prost(uint32, tag = "8")] num_layers: u32,
        #[prost(string, tag = "9")] transport: String,
        #[prost(uint64, tag = "10")] remaining_ms: u64,
        #[prost(bool, tag = "11")] wants_table: bool,
        #[prost(uint32, optional, tag = "12")] order: Option<u32>,
    }
    Grant {
        #[prost(uint64, tag = "1")] transfer: u64,
        #[prost(uint64, tag = "2")] cache: u64,
        #[prost(uint32, tag = "3")] num_blocks: u32,
        #[prost(message, optional, tag = "4")] table: Option<Table>,
        #[prost(uint64, tag = "5")] remaining_ms: u64,
    }
    Table {
        #[prost(bytes = "vec", tag = "1")] starts: Vec<u8>,
        #[prost(bytes = "vec", tag = "2")] lens: Vec<u8>,
    }
    Fault {
        #[prost(uint32, tag = "1")] code: u32,
        #[prost(string, tag = "2")] message: String,
        #[prost(string, tag = "3")] hint: String,
    }
    TransferFault {
        #[prost(uint64, tag = "1")] transfer: u64,
        #[prost(message, optional, tag = "2")] fault: Option<Fault>,
    }
    TransferOnly {
        #[prost(uint64, tag = "1")] transfer: u64,
    }
    Done {
        #[prost(uint64, tag = "1")] transfer: u64,
        #[prost(uint64, tag = "2")] bytes: u64,
    }
    Abandon {
        #[prost(uint64, tag = "1")] transfer: u64,
        #[prost(uint32, tag = "2")] code: u32,
    }
    Renew {
        #[prost(uint64, tag = "1")] request: u64,
        #[prost(message, optional, tag = "2")] reference: Option<Reference>,
        #[prost(uint64, tag = "3")] extend_ms: u64,
    }
    Renewed {
        #[prost(uint64, tag = "1")] request: u64,
        #[prost(uint64, tag = "2")] remaining_ms: u64,
        #[prost(message, optional, tag = "3")] fault: Option<Fault>,
    }
    Reject {
        #[prost(message, optional, tag = "1")] reference: Option<Reference>,
        #[prost(uint64, tag = "2")] consumer: u64,
    }
    StatusReply {
        #[prost(uint64, tag = "1")] transfer: u64,
        #[prost(uint32, tag = "2")] status: u32,
        #[prost(message, optional, tag = "3")] fault: Option<Fault>,
    }
    Notify {
        #[prost(bytes = "vec", tag = "1")] bytes: Vec<u8>,
    }
    Sequence {
        #[prost(uint64, tag = "1")] sequence: u64,
    }
    Goodbye {
        #[prost(string, tag = "1")] reason: String,
    }
}
