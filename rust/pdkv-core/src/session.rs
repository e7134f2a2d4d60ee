//! The handshake, without I/O: what both sides say, and whether each believes the other.
//!
//! A connection that was accepted proves nothing: every identity field is checked, the answer must
//! echo this very attempt, and a refusal lists everything that differs, not just the first thing.

use core::time::Duration;

use crate::error::{Error, ErrorKind, Result, Retry};
use crate::id::{Incarnation, SessionToken};
use crate::lease::Now;
use crate::node::RemotePeer;
use crate::wire::{CacheAdvert, HandshakeRefusal, Hello, HelloAck, Message};

/// Lowest protocol version this release speaks.
pub const MIN_VERSION: u32 = 1;
/// Highest protocol version this release speaks.
pub const MAX_VERSION: u32 = 1;
/// Time for each step of a handshake unless the caller wants less.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(5);

/// Feature bits of the hello. Both sides use what both have.
pub mod features {
    /// `Status` and `StatusReply`: a lost completion can be asked for again.
    pub const STATUS: u64 = 1 << 0;
    /// `Renew` and `Reject` over the channel.
    pub const LEASES: u64 = 1 << 1;
    /// A data stream may say what it is for, a lane of `ucx` among them.
    pub const UCX: u64 = 1 << 2;
    /// A data stream may be a pipe.
    pub const PIPE: u64 = 1 << 3;
    /// Every data stream is answered once the owner has taken it on, those over the local socket too, and one that it
    /// doesn't take on is refused by a word.
    pub const STREAM_ANSWERS: u64 = 1 << 4;
    /// What this release has.
    pub const OURS: u64 = STATUS | LEASES | UCX | PIPE | STREAM_ANSWERS;
    /// What this release can't do without.
    pub const REQUIRED: u64 = STATUS | LEASES;
}

/// What both sides agreed on.
#[derive(Clone, Debug, PartialEq)]
pub struct Established {
    /// Protocol version to speak.
    pub version: u32,
    /// Features both have.
    pub features: u64,
    /// What data streams present.
    pub token: SessionToken,
    /// The other side.
    pub remote: Hello,
}

impl Established {
    /// What a node needs to know of the other side.
    pub fn remote_peer(&self) -> RemotePeer {
        RemotePeer {
            name: self.remote.name.clone(),
            incarnation: self.remote.incarnation,
            peer_timeout: self.remote.peer_timeout,
        }
    }
}

/// The connecting side between its hello and the answer.
#[derive(Debug)]
pub struct Connecting {
    sent: Hello,
    deadline: Now,
}

impl Connecting {
    /// Starts an attempt. `hello.attempt` must be fresh random bytes.
    pub fn new(now: Now, hello: Hello, timeout: Duration) -> Self {
        Self {
            sent: hello,
            deadline: now.saturating_add(timeout),
        }
    }

    /// The first frame.
    pub fn hello(&self) -> Message {
        Message::Hello(Box::new(self.sent.clone()))
    }

    /// When the attempt is over.
    pub fn deadline(&self) -> Now {
        self.deadline
    }

    /// The error of an attempt that was not answered in time.
    pub fn timed_out(&self) -> Error {
        Error::new(
            ErrorKind::PeerUnreachable,
            "handshake",
            "the peer accepted the connection but did not answer the hello",
        )
        .with_hint("is it a pdkv engine that listens there, and is its process running?")
    }

    /// Judges the answer.
    ///
    /// # Errors
    /// `Handshake` listing every field that is wrong; its retry advice is `Later` when the answer is of
    /// another attempt or lacks an identity, as one from a peer that is just restarting.
    pub fn answered(&self, now: Now, message: Message) -> Result<Established> {
        if now > self.deadline {
            return Err(self.timed_out());
        }
        let ack = match message {
            Message::HelloAck(ack) => *ack,
            Message::HandshakeRefusal(refusal) => {
                return Err(Error::new(
                    ErrorKind::Handshake,
                    "handshake",
                    format!("the peer refused: {}", refusal.message),
                ));
            }
            other => {
                return Err(Error::new(
                    ErrorKind::Handshake,
                    "handshake",
                    format!("the peer answered the hello with `{}`", other.name()),
                ));
            }
        };
        let mut faults = Faults::default();
        faults.identity(&ack.hello);
        faults.stale(ack.hello.attempt != self.sent.attempt, || {
            format!(
                "attempt: `{}` was sent, `{}` came back",
                short(&self.sent.attempt),
                short(&ack.hello.attempt)
            )
        });
        faults.stale(*ack.token.as_bytes() == [0; 16], || "token: empty".to_owned());
        let version = negotiate(&self.sent, &ack.hello);
        faults.wrong(version != Some(ack.version), || {
            format!(
                "version: `{}` was chosen, {}",
                ack.version,
                ranges(&self.sent, &ack.hello)
            )
        });
        faults.wrong(ack.features != self.sent.features & ack.hello.features, || {
            format!(
                "features: `{:#x}` were chosen, ours are `{:#x}`, theirs `{:#x}`",
                ack.features, self.sent.features, ack.hello.features
            )
        });
        faults.required(ack.features);
        faults.into_result()?;
        Ok(Established {
            version: ack.version,
            features: ack.features,
            token: ack.token,
            remote: ack.hello,
        })
    }
}

/// Judges a hello on the accepting side. `local` is this side's own hello, `token` is random.
///
/// # Errors
/// The refusal to send before closing, and the error for this side.
pub fn accept(local: &Hello, token: SessionToken, remote: Hello) -> Result<(Message, Established), (Message, Error)> {
    let mut faults = Faults::default();
    faults.identity(&remote);
    faults.stale(remote.attempt == [0; 16], || "attempt: empty".to_owned());
    let version = negotiate(local, &remote);
    faults.wrong(version.is_none(), || {
        format!("version: nothing in common, {}", ranges(local, &remote))
    });
    let features = local.features & remote.features;
    faults.required(features);
    if let Err(error) = faults.into_result() {
        let refusal = HandshakeRefusal {
            kind: error.kind(),
            message: error.message().to_owned(),
        };
        return Err((Message::HandshakeRefusal(refusal), error));
    }
    let version = version.unwrap_or(MIN_VERSION);
    let hello = Hello {
        attempt: remote.attempt,
        ..local.clone()
    };
    let ack = HelloAck {
        hello,
        version,
        features,
        token,
    };
    Ok((
        Message::HelloAck(Box::new(ack)),
        Established {
            version,
            features,
            token,
            remote,
        },
    ))
}

/// Whether bytes of `theirs` can be used in `ours`.
///
/// # Errors
/// `Handshake` listing every differing field with both values.
pub fn check_caches(ours: &CacheAdvert, theirs: &CacheAdvert) -> Result<()> {
    if ours.fingerprint == theirs.fingerprint {
        return Ok(());
    }
    let mut faults = Faults::default();
    let mut differ = |field: &str, ours: &dyn std::fmt::Display, theirs: &dyn std::fmt::Display| {
        faults
            .list
            .push(format!("{field}: ours is `{ours}`, theirs is `{theirs}`"));
    };
    if ours.model != theirs.model {
        differ("model", &ours.model, &theirs.model);
    }
    for difference in ours.layout.differences(&theirs.layout) {
        differ(difference.field, &difference.ours, &difference.theirs);
    }
    let shard = [
        ("first_layer", ours.shard.first_layer, theirs.shard.first_layer),
        ("num_layers", ours.shard.num_layers, theirs.shard.num_layers),
        ("total_layers", ours.shard.total_layers, theirs.shard.total_layers),
        ("first_head", ours.shard.first_head, theirs.shard.first_head),
        ("num_heads", ours.shard.num_heads, theirs.shard.num_heads),
        ("total_heads", ours.shard.total_heads, theirs.shard.total_heads),
    ];
    for (field, our_value, their_value) in shard {
        if our_value != their_value {
            differ(&format!("shard.{field}"), &our_value, &their_value);
        }
    }
    if faults.list.is_empty() {
        faults
            .list
            .push("fingerprint: the two releases name equal fields differently".to_owned());
    }
    faults.into_result()
}

fn negotiate(a: &Hello, b: &Hello) -> Option<u32> {
    let highest = a.max_version.min(b.max_version);
    (highest >= a.min_version.max(b.min_version)).then_some(highest)
}

fn ranges(ours: &Hello, theirs: &Hello) -> String {
    format!(
        "ours are `{}..={}`, theirs `{}..={}`",
        ours.min_version, ours.max_version, theirs.min_version, theirs.max_version
    )
}

fn short(bytes: &[u8; 16]) -> String {
    crate::hex::encode(&bytes[..4])
}

/// Collects everything that is wrong, so that one refusal tells all.
#[derive(Default)]
struct Faults {
    list: Vec<String>,
    /// Only faults that a restarting peer makes.
    lasting: bool,
}

impl Faults {
    fn wrong(&mut self, wrong: bool, text: impl FnOnce() -> String) {
        if wrong {
            self.lasting = true;
            self.list.push(text());
        }
    }

    fn stale(&mut self, wrong: bool, text: impl FnOnce() -> String) {
        if wrong {
            self.list.push(text());
        }
    }

    fn identity(&mut self, hello: &Hello) {
        self.stale(hello.name.is_empty(), || "name: empty".to_owned());
        self.stale(hello.incarnation == Incarnation::new([0; 16]), || {
            "incarnation: empty".to_owned()
        });
        let times = [("peer_timeout", hello.peer_timeout), ("heartbeat", hello.heartbeat)];
        for (field, value) in times {
            self.wrong(value.is_zero(), || format!("{field}: zero"));
        }
    }

    fn required(&mut self, features: u64) {
        let missing = features::REQUIRED & !features;
        self.wrong(missing != 0, || {
            format!("features: `{missing:#x}` are needed and not in common")
        });
    }

    fn into_result(self) -> Result<()> {
        if self.list.is_empty() {
            return Ok(());
        }
        let retry = if self.lasting { Retry::Never } else { Retry::Later };
        Err(Error::new(ErrorKind::Handshake, "handshake", self.list.join("; ")).with_retry(retry))
    }
}
