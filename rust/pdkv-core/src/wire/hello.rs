//! What two engines tell each other when they meet: who they are, what they speak, what memory they
//! have. How the answers are judged is in `session`.

use core::time::Duration;

use crate::error::ErrorKind;
use crate::id::{CacheId, Incarnation, RegionId, SessionToken};
use crate::layout::KvLayout;
use crate::shard::Shard;

/// The connecting side's first frame, and the identity half of the answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Hello {
    /// Lowest protocol version spoken.
    pub min_version: u32,
    /// Highest protocol version spoken.
    pub max_version: u32,
    /// Features offered, a set of [`features`](crate::session::features) bits.
    pub features: u64,
    /// Name of the engine.
    pub name: String,
    /// Its life.
    pub incarnation: Incarnation,
    /// Address where it accepts connections; empty if it doesn't.
    pub address: String,
    /// What the same-host transports need to know.
    pub host: HostFacts,
    /// Silence after which this side drops the channel.
    pub peer_timeout: Duration,
    /// How often this side sends something.
    pub heartbeat: Duration,
    /// Registered memory.
    pub regions: Vec<RegionAdvert>,
    /// Registered caches.
    pub caches: Vec<CacheAdvert>,
    /// Names this attempt to connect; echoed in the answer, so an old answer can't be taken for a new one.
    pub attempt: [u8; 16],
}

/// Where an engine runs. Hints only: same-host transports prove themselves by a probe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// Process id in its own namespace.
    pub pid: u32,
    /// The kernel's boot id.
    pub boot_id: String,
    /// Inode of the PID namespace.
    pub pid_namespace: u64,
    /// Abstract Unix socket for descriptors and local streams; empty if there is none.
    pub local_socket: String,
    /// Memory to read for proof.
    pub probe: Option<Probe>,
}

/// Thirty-two random bytes at an address: who can read them may read the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Where, in the advertiser's address space.
    pub address: u64,
    /// What must be there.
    pub nonce: [u8; 32],
}

/// The accepting side's answer.
#[derive(Clone, Debug, PartialEq)]
pub struct HelloAck {
    /// The accepting side's own hello, with the attempt of the connecting side.
    pub hello: Hello,
    /// The version both will speak.
    pub version: u32,
    /// The features both have.
    pub features: u64,
    /// What data streams of this session present.
    pub token: SessionToken,
}

/// The accepting side won't talk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandshakeRefusal {
    /// What kind of error the connecting side should see.
    pub kind: ErrorKind,
    /// Why, every differing field.
    pub message: String,
}

/// First frame of a data stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHello {
    /// Token from the [`HelloAck`].
    pub token: SessionToken,
    /// Incarnation of the connecting engine.
    pub incarnation: Incarnation,
    /// Number of the stream.
    pub index: u32,
    /// What it is for.
    pub purpose: StreamPurpose,
}

/// What a data stream is for. Anything but the first needs the feature bit that names it, because a
/// release without it would take the stream for data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum StreamPurpose {
    /// Requests of `tcp` and their payload.
    #[default]
    Data = 0,
    /// The side channel of a lane of `ucx`.
    UcxLane = 1,
    /// A pipe from the connecting engine to the other.
    Pipe = 2,
}

impl StreamPurpose {
    /// The purpose with this number on the wire.
    pub fn from_code(code: u32) -> Option<Self> {
        [Self::Data, Self::UcxLane, Self::Pipe]
            .into_iter()
            .find(|purpose| *purpose as u32 == code)
    }
}

/// One registered region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionAdvert {
    /// Its id.
    pub id: RegionId,
    /// Bytes.
    pub len: u64,
    /// Address in the owner's process, for same-host transports that have proved themselves.
    pub base_address: u64,
    /// The part that lives in a shared descriptor.
    pub shared: Option<SharedExtent>,
    /// Whether raw one-sided reads and writes are allowed.
    pub raw_access: bool,
    /// The name it was registered under, or empty.
    pub name: String,
    /// What GPU it is memory of; host memory when `None`.
    pub device: Option<DeviceAdvert>,
}

impl RegionAdvert {
    /// Said to be the address of a GPU's memory, which nobody reaches by address: beyond what any process can have, so
    /// that a release that knows no GPUs and has its kernel try finds nothing there.
    pub const NOWHERE: u64 = 1 << 63;
}

/// Which GPU a region is memory of, and whether neighbours may map it. Under what name they do is told to processes of the
/// same host only, over the local socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAdvert {
    /// The GPU's own number, the same for every process.
    pub uuid: [u8; 16],
    /// Why no other process can map it; empty when one can.
    pub sealed: String,
    /// Whether an allocator may put other memory there: then its owner says, over the local socket, whether the memory is still the one that was
    /// registered, and whoever copied there or from there by `cuda`, without a claim, asks.
    pub movable: bool,
}

/// Which bytes of a region are in its memfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExtent {
    /// First shared byte, as offset in the region.
    pub offset: u64,
    /// Shared bytes.
    pub len: u64,
}

/// One registered cache.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheAdvert {
    /// Its id.
    pub id: CacheId,
    /// Where its bytes are.
    pub layout: KvLayout,
    /// The region of each layout region, in order.
    pub regions: Vec<RegionId>,
    /// Which part of the model it holds.
    pub shard: Shard,
    /// What its bytes mean, see [`digest`](crate::digest).
    pub fingerprint: [u8; 32],
    /// Model name, for messages.
    pub model: String,
}
