//! A peer we connected to: the ways into its memory, and the raw one-sided verbs.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use pdkv_core::capability::Require;
use pdkv_core::gpu_memory::GpuMemory;
use pdkv_core::id::{Incarnation, RegionId};
use pdkv_core::reference::Reference;
use pdkv_core::wire::{MAX_NOTIFY, Message, Notify};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::Event;

use crate::config::TransportKind;
use crate::link::PeerLink;
use crate::lists::{Memories, Regions};
use crate::post::{Order, Table, post};
use crate::pull::INLINE_BYTES;
use crate::raw::Raw;
use crate::remote::RemoteRegion;
use crate::shared::Shared;
use crate::transfer::{Transfer, TransferCore, TransferStats};
use crate::transport::onesided::OneSided;
use crate::transport::{Direction, Way};

/// A range of a region registered here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalSpan {
    /// The region.
    pub region: RegionId,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// A range of a region registered at the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteSpan {
    /// The region, in the peer's numbering.
    pub region: RegionId,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// How a raw transfer is to be done.
#[derive(Clone, Debug)]
pub struct RawOptions {
    /// Time the transfer may take.
    pub timeout: Duration,
    /// Only this.
    pub require: Option<Require>,
    /// What must have passed before a byte is touched, as in [`PullOptions`](crate::PullOptions). Default: nothing.
    pub after: Option<Arc<Event>>,
}

impl Default for RawOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            require: None,
            after: None,
        }
    }
}

/// One transport towards a peer, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LinkInfo {
    /// Which.
    pub transport: TransportKind,
    /// Whether it can be used with this peer at all.
    pub usable: bool,
    /// How it moves memory of GPUs, as far as that is known.
    pub gpu: GpuMemory,
    /// What it rides on, or the reason against it.
    pub detail: String,
}

/// A connection to another engine, made by [`Engine::connect`](crate::Engine::connect).
#[derive(Clone)]
pub struct Peer {
    pub(crate) link: Arc<PeerLink>,
    pub(crate) shared: Arc<Shared>,
}

impl Peer {
    /// The peer's name.
    pub fn name(&self) -> &str {
        &self.link.remote.name
    }

    /// The address it was reached at.
    pub fn address(&self) -> &str {
        &self.link.address
    }

    /// The peer's life.
    pub fn incarnation(&self) -> Incarnation {
        self.link.remote.incarnation
    }

    /// Whether the connection stands.
    pub fn alive(&self) -> bool {
        !self.link.lost.load(Ordering::Acquire)
    }

    /// Every transport of this engine: usable with this peer, or why not.
    pub fn links(&self) -> Vec<LinkInfo> {
        let alive = self.link.check_alive().map_err(|error| error.message().to_owned());
        let info = |way: &Way| {
            let usable = alive.clone().and(way.link.as_ref().map_err(Clone::clone));
            // A link may have lost what it rode on since it was found.
            let usable = usable.and_then(|link| link.reaches(&Memories::default(), &Regions::default()).map(|()| link));
            let (gpu, detail) = match &usable {
                Ok(link) => (link.capability().gpu, link.detail()),
                Err(reason) => (GpuMemory::Refused, reason.clone()),
            };
            LinkInfo {
                transport: way.kind,
                usable: usable.is_ok(),
                gpu,
                detail,
            }
        };
        self.link.ways.iter().map(info).collect()
    }

    /// Reads the peer's spans into local ones, pairwise. Small reads over a one-sided transport are
    /// done when this returns. A region that the peer registered this moment is waited for, for a round trip,
    /// or ten seconds where the peer doesn't answer.
    ///
    /// # Errors
    /// `Region`, `Layout` (lengths that disagree), `Unsupported`, `PeerLost`, `TransferTimeout`, `Closed`.
    pub fn read(
        &self,
        dst: &[LocalSpan],
        src: &[RemoteSpan],
        notify: Option<&[u8]>,
        options: &RawOptions,
    ) -> Result<Transfer> {
        self.raw(Direction::Read, dst, src, notify, options)
    }

    /// Writes local spans into the peer's, pairwise. The notification, if any, is delivered after
    /// the last byte.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(
        &self,
        dst: &[RemoteSpan],
        src: &[LocalSpan],
        notify: Option<&[u8]>,
        options: &RawOptions,
    ) -> Result<Transfer> {
        self.raw(Direction::Write, src, dst, notify, options)
    }

    fn raw(
        &self,
        direction: Direction,
        local: &[LocalSpan],
        remote: &[RemoteSpan],
        notify: Option<&[u8]>,
        options: &RawOptions,
    ) -> Result<Transfer> {
        let posted = Instant::now();
        self.shared.check_open("raw transfer")?;
        self.link.check_alive()?;
        check_notify(notify)?;
        let here = Table::build(
            local,
            |span| (span.region, span.offset, span.len),
            |id| self.shared.registry.region(id).map(|region| region.memory.clone()),
        )?;
        let there = Table::build(
            remote,
            |span| (span.region, span.offset, span.len),
            |id| self.remote_region(id, options.timeout),
        )?;
        let bytes = local.iter().map(|span| span.len).fold(0, u64::saturating_add);
        if let ([near], [far], None) = (local, remote, notify)
            && options.after.is_none()
            && near.len == far.len
            && bytes <= INLINE_BYTES
            && let Ok(here) = here.regions[0].host()
            && let Some(direct) = self.direct(&there.regions, options.require)
        {
            let there = &there.regions[0];
            direct.copy_one(direction, (here, near.offset), (there, far.offset), bytes)?;
            let elapsed = posted.elapsed().as_secs_f64() * 1e6;
            let stats = TransferStats {
                bytes,
                runs: 1,
                wire_us: elapsed,
                post_us: elapsed,
                ..Default::default()
            };
            let core = TransferCore::finished(Raw::new_id(), Arc::clone(direct.path()), stats);
            return Ok(Transfer::new(Arc::new(core), &self.shared));
        }
        let order = Order {
            direction,
            require: options.require,
            timeout: options.timeout,
            notify,
            after: options.after.as_ref(),
            posted,
        };
        post(&self.shared, &self.link, &order, here, there)
    }

    /// The best one-sided link that reaches the regions now, without weighing or waiting: for
    /// operations so small that the choice would cost more than the copy.
    fn direct(&self, regions: &[Arc<RemoteRegion>], require: Option<Require>) -> Option<&Arc<OneSided>> {
        let fits = |link: &&Arc<OneSided>| require.is_none_or(|require| link.serves(require)) && link.ready(regions);
        self.link.direct.iter().find(fits)
    }

    fn remote_region(&self, id: RegionId, limit: Duration) -> Result<Arc<RemoteRegion>> {
        let region = self.link.region(&self.shared, id, limit)?.ok_or_else(|| {
            Error::new(
                ErrorKind::Region,
                "raw transfer",
                format!("the peer `{}` has no region `{id}`", self.name()),
            )
            .with_hint("it was deregistered, or the descriptor is of another engine")
        })?;
        if !region.raw_access {
            return Err(Error::new(
                ErrorKind::Region,
                "raw transfer",
                format!("region `{id}` of the peer holds KV blocks"),
            )
            .with_hint("KV blocks move by reference: pull() an export or push() to an offer"));
        }
        Ok(region)
    }

    /// Sends small bytes to the peer's application.
    ///
    /// # Errors
    /// `Capacity` for more than 1 MiB, `PeerLost`, `Closed`.
    pub fn notify(&self, bytes: &[u8]) -> Result<()> {
        check_notify(Some(bytes))?;
        self.with_channel(|entry| entry.send(&Message::Notify(Notify { bytes: bytes.to_vec() })))
    }

    fn with_channel<T>(&self, send: impl FnOnce(&mut crate::shared::PeerEntry) -> Result<T>) -> Result<T> {
        self.shared.check_open("peer")?;
        self.link.check_alive()?;
        let mut state = self.shared.lock();
        match state.peers.get_mut(&self.link.key) {
            Some(entry) => send(entry),
            None => Err(Error::new(
                ErrorKind::PeerLost,
                "peer",
                format!("the peer `{}` is gone", self.name()),
            )),
        }
    }

    /// Tells the owner that this consumer won't come; frees the export at once. Doing it twice is
    /// no error.
    ///
    /// # Errors
    /// `PeerLost`, `Closed`.
    pub fn reject(&self, reference: &Reference) -> Result<()> {
        self.shared.check_open("reject")?;
        self.link.check_alive()?;
        let consumer = self.shared.next_consumer();
        self.shared
            .drive(|state, _| state.node.reject(self.link.key, reference.clone(), consumer))
    }

    /// Asks the owner to extend the lease; blocks for its answer. Returns what remains.
    ///
    /// # Errors
    /// The owner's refusal; `TransferTimeout` when no answer came in time; `PeerLost`, `Closed`.
    pub fn renew(&self, reference: &Reference, lease: Duration, timeout: Duration) -> Result<Duration> {
        self.shared.check_open("renew")?;
        self.link.check_alive()?;
        let (answer, answered) = mpsc::channel();
        self.shared.drive(|state, now| {
            let request = state.node.renew_remote(now, self.link.key, reference.clone(), lease)?;
            state.raw.expect_renewal(request, answer);
            Ok::<_, Error>(())
        })?;
        answered.recv_timeout(timeout).unwrap_or_else(|_| {
            Err(Error::new(
                ErrorKind::TransferTimeout,
                "renew",
                "the owner did not answer in time",
            ))
        })
    }

    /// Waits, for `timeout` at most, until the peer has said whether it has the cache that a reference names: a pull or a push
    /// of a reference whose cache was registered this moment would wait for that in its caller. Without any time it looks and
    /// asks nobody. Gives whether pulls and pushes wait for nobody now.
    ///
    /// # Errors
    /// `ReferenceUnknown` when the peer says that it has none, `TransferTimeout` when it says nothing, `PeerLost`, `Closed`.
    pub fn await_cache(&self, reference: &Reference, timeout: Duration) -> Result<bool> {
        self.shared.check_open("await_cache")?;
        self.link.await_cache(&self.shared, reference.cache, timeout)
    }

    /// Ends the connection; running transfers with the peer fail. In a forked child it does nothing.
    pub fn close(&self) {
        if !self.shared.at_home() {
            return;
        }
        let error = Error::new(
            ErrorKind::PeerLost,
            "close",
            format!("the connection to `{}` was closed here", self.name()),
        );
        self.shared.hang_up(self.link.key, &error);
    }
}

fn check_notify(bytes: Option<&[u8]>) -> Result<()> {
    match bytes {
        Some(bytes) if bytes.len() > MAX_NOTIFY => Err(Error::new(
            ErrorKind::Capacity,
            "notify",
            format!(
                "a notification of `{}` bytes, at most `{MAX_NOTIFY}` are sent",
                bytes.len()
            ),
        )
        .with_hint("notifications name things; move data with read() and write()")
        .with_retry(pdkv_core::Retry::Never)),
        _ => Ok(()),
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.alive() { "connected" } else { "lost" };
        write!(f, "Peer({}, {}, {state})", self.name(), self.address())
    }
}
