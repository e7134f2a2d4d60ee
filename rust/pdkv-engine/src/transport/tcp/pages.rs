//! Pages on their way to or from a socket: those of the host as they lie, those of a GPU by way of pinned host memory.
//!
//! Whoever names pages names them in the order of the stream. Stages are few, and both ends of a stream may need some, so there are rules
//! by which two engines never wait for each other's. What goes out and what comes in have shelves of their own. A sender has every stage
//! that its payload needs before the first byte goes out, and takes those of several GPUs in the order of their numbers. A receiver takes
//! one only when bytes are there, so that whoever sends them waits for nothing but this receiver, and gives it back as soon as they are
//! placed. Whose peer keeps a stage waiting too long while others want one is ended.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pdkv_core::id::PeerKey;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::{DeviceRegion, Gpu, Holder, PeerClock, STAGE_BYTES, Stage, Staging};
use pdkv_device::{IoBatch, Memory, Stop};

use super::socket::Socket;
use crate::config::EngineConfig;

/// The stages of an engine: those to send from and those to receive into, half of the bytes each.
pub(crate) struct Stagings {
    bytes: u64,
    patience: Duration,
    verify: bool,
    shelves: Mutex<Shelves>,
}

#[derive(Default)]
struct Shelves {
    /// By the number of the GPU, and whether they are to send from.
    open: BTreeMap<(u32, bool), Arc<Staging>>,
    closed: bool,
}

impl Stagings {
    /// Stages as the settings of the engine say.
    pub(crate) fn new(config: &EngineConfig) -> Self {
        Self {
            bytes: config.staging_bytes,
            patience: config.staging_patience,
            verify: config.verify_copies,
            shelves: Mutex::default(),
        }
    }

    /// Whether memory of a GPU can be staged here.
    ///
    /// # Errors
    /// The reason when not.
    pub(crate) fn usable(&self) -> Result<(), String> {
        if self.bytes == 0 {
            return Err("device memory, and `staging_bytes` is 0".to_owned());
        }
        Ok(())
    }

    fn shelves(&self) -> MutexGuard<'_, Shelves> {
        self.shelves.lock().expect("no holder panics")
    }

    /// Gives the stages back: those in use when they are done with. On a thread of its own, for the driver frees pinned memory when the GPU has done what it
    /// was asked for, and whoever closes, or lets go of the last handle, may hold the interpreter's lock.
    pub(crate) fn close(&self) {
        let shelves = std::mem::replace(
            &mut *self.shelves(),
            Shelves {
                closed: true,
                ..Shelves::default()
            },
        );
        if !shelves.open.is_empty() {
            // Without a thread for it, it is done here.
            let _ = crate::mover::spawn("pdkv-stages", move || drop(shelves));
        }
    }

    fn take(&self, gpu: &Gpu, flow: Flow<'_>, stop: &dyn Stop) -> Result<Stage> {
        let staging = {
            let mut shelves = self.shelves();
            if shelves.closed {
                return Err(Error::new(ErrorKind::Closed, "stage", "the engine was closed"));
            }
            match shelves.open.entry((gpu.ordinal(), flow.sends)) {
                Entry::Occupied(known) => Arc::clone(known.get()),
                Entry::Vacant(place) => {
                    let staging = Staging::new(gpu, self.bytes / 2, self.patience, self.verify)?;
                    Arc::clone(place.insert(staging))
                }
            }
        };
        staging.take(Holder(flow.peer.0), stop)
    }
}

/// The GPUs of some memory, each once, in the order in which their stages are taken.
pub(crate) fn gpus_of<'m>(memory: impl IntoIterator<Item = &'m Memory>) -> Vec<Gpu> {
    let devices = memory.into_iter().filter_map(Memory::device);
    let by_number: BTreeMap<_, _> = devices
        .map(|region| (region.gpu().ordinal(), region.gpu().clone()))
        .collect();
    by_number.into_values().collect()
}

/// Which way a payload goes on which stream.
#[derive(Clone, Copy)]
pub(crate) struct Flow<'a> {
    pub(crate) stagings: &'a Stagings,
    pub(crate) socket: &'a Socket,
    pub(crate) peer: PeerKey,
    /// From our pages into the socket, or back.
    pub(crate) sends: bool,
    /// Ends it.
    pub(crate) stop: &'a AtomicBool,
}

/// Ends the wait for a stage to send from: nobody has been sent anything yet.
struct Unsent<'a> {
    ended: &'a AtomicBool,
    socket: &'a Socket,
}

impl Stop for Unsent<'_> {
    fn stopped(&self) -> bool {
        self.ended.stopped() || self.socket.is_gone()
    }
}

/// Ends what the peer has to do its part for.
struct Carried<'a> {
    stop: &'a AtomicBool,
    clocks: Vec<Arc<PeerClock>>,
}

impl Stop for Carried<'_> {
    fn stopped(&self) -> bool {
        self.stop.stopped() || self.clocks.iter().any(|clock| clock.stopped())
    }
}

/// The payload of one request.
pub(crate) struct Pages<'a> {
    batch: IoBatch<'a>,
    /// Of a sender all that it needs, of a receiver the one that is being filled. One at most holds bytes.
    stages: Vec<Stage>,
    /// Contiguous pieces that went through the socket.
    pub(crate) pieces: u64,
    /// Bytes that went through a stage.
    pub(crate) staged: u64,
}

impl<'a> Pages<'a> {
    /// No pages yet; `batch` is empty and gives its memory.
    pub(crate) fn new(batch: IoBatch<'a>) -> Self {
        Self {
            batch,
            stages: Vec::new(),
            pieces: 0,
            staged: 0,
        }
    }

    /// Before the first byte of a payload that goes out: takes the stages of the GPUs that it comes from, which are told in the order
    /// of [`gpus_of`]. `ended` ends the wait, as does the end of the stream.
    ///
    /// # Errors
    /// `TransferCancelled`, `PeerLost`; `Unsupported` or `Device` when there can be no stage.
    pub(crate) fn prepare(&mut self, flow: Flow<'_>, gpus: &[Gpu], ended: &AtomicBool) -> Result<()> {
        let socket = flow.socket;
        for gpu in gpus {
            let taken = flow.stagings.take(gpu, flow, &Unsent { ended, socket });
            self.stages.push(taken.map_err(|error| match error.kind() {
                ErrorKind::TransferCancelled if !ended.stopped() => {
                    Error::new(ErrorKind::PeerLost, "send", "the peer closed the stream")
                }
                _ => error,
            })?);
        }
        Ok(())
    }

    /// The next bytes. Moves what was named before where there is no room for more.
    ///
    /// # Errors
    /// As [`Pages::finish`], and `Region` for bytes that do not lie in the memory.
    pub(crate) fn push(&mut self, flow: Flow<'_>, memory: &'a Memory, offset: u64, len: u64) -> Result<()> {
        match memory {
            Memory::Host(region) => {
                self.flush_stage(flow)?;
                // With stages in hand not much at a time, for each time the peer has its patience anew.
                let most = if self.stages.is_empty() { u64::MAX } else { STAGE_BYTES };
                let mut done = 0;
                loop {
                    let part = (len - done).min(most - self.batch.bytes());
                    let full = self.batch.push(region, offset + done, part)?;
                    done += part;
                    if full || self.batch.bytes() == most {
                        self.flush_batch(flow)?;
                    }
                    if done == len {
                        return Ok(());
                    }
                }
            }
            Memory::Device(region) => {
                self.flush_batch(flow)?;
                self.push_device(flow, region, offset, len)
            }
        }
    }

    fn push_device(&mut self, flow: Flow<'_>, region: &Arc<DeviceRegion>, offset: u64, len: u64) -> Result<()> {
        let mut done = 0;
        while done < len {
            let at = self.stage_of(flow, region.gpu())?;
            let stage = &mut self.stages[at];
            done += stage.push(region, offset + done, len - done)?;
            if stage.is_full() {
                self.flush_stage(flow)?;
            }
        }
        Ok(())
    }

    /// Which stage the next bytes of a GPU go through. None of another GPU's are before them any more.
    fn stage_of(&mut self, flow: Flow<'_>, gpu: &Gpu) -> Result<usize> {
        let here = |stage: &Stage| stage.gpu().ordinal() == gpu.ordinal();
        if self.stages.iter().any(|stage| stage.bytes() > 0 && !here(stage)) {
            self.flush_stage(flow)?;
        }
        if let Some(at) = self.stages.iter().position(here) {
            return Ok(at);
        }
        if flow.sends {
            let text = format!("GPU `{}` was not named before its pages", gpu.ordinal());
            return Err(Error::new(ErrorKind::Internal, "send", text));
        }
        flow.socket.wait_readable(flow.stop);
        self.stages.push(flow.stagings.take(gpu, flow, flow.stop)?);
        Ok(self.stages.len() - 1)
    }

    /// Moves what is left, and gives the stages back.
    ///
    /// # Errors
    /// `TransferCancelled` when stopped, `PeerLost` when the stream ended, `Device` when the GPU fails, `TransferTimeout` when the peer
    /// kept a stage waiting for too long.
    pub(crate) fn finish(&mut self, flow: Flow<'_>) -> Result<()> {
        self.flush_stage(flow)?;
        self.flush_batch(flow)?;
        self.stages.clear();
        Ok(())
    }

    /// What it was made with.
    pub(crate) fn into_batch(self) -> IoBatch<'a> {
        self.batch
    }

    fn flush_batch(&mut self, flow: Flow<'_>) -> Result<()> {
        if self.batch.is_empty() {
            return Ok(());
        }
        self.pieces += self.batch.pieces() as u64;
        carry(&mut self.batch, &self.stages, flow)
    }

    fn flush_stage(&mut self, flow: Flow<'_>) -> Result<()> {
        let Some(at) = self.stages.iter().position(|stage| stage.bytes() > 0) else {
            return Ok(());
        };
        let stage = &mut self.stages[at];
        if flow.sends {
            stage.pack()?;
        }
        let bytes = stage.bytes();
        let host = Arc::clone(stage.host()?);
        let mut whole = IoBatch::new();
        whole.push(&host, 0, bytes)?;
        carry(&mut whole, &self.stages, flow)?;
        if flow.sends {
            self.stages[at].clear();
        } else {
            // What came is of a claim that may have ended while the last bytes were on their way.
            if flow.stop.load(Ordering::Acquire) {
                let message = "stopped before the last bytes were placed";
                return Err(Error::new(ErrorKind::TransferCancelled, "receive", message));
            }
            self.stages[at].unpack()?;
            self.stages.clear();
        }
        self.pieces += 1;
        self.staged += bytes;
        Ok(())
    }
}

/// Has the peer take or bring these bytes, on its time.
fn carry(batch: &mut IoBatch<'_>, stages: &[Stage], flow: Flow<'_>) -> Result<()> {
    let clocks: Vec<_> = stages.iter().map(|stage| Arc::clone(stage.clock())).collect();
    for clock in &clocks {
        clock.start();
    }
    let stop = Carried {
        stop: flow.stop,
        clocks,
    };
    let carried = if flow.sends {
        batch.send_all(flow.socket.fd(), &[], &stop)
    } else {
        batch.recv_all(flow.socket.fd(), &stop)
    };
    for clock in &stop.clocks {
        clock.stop();
    }
    carried.map(drop).map_err(|error| {
        let overdue = stages.iter().find_map(Stage::overdue);
        // Whoever was told to stop is told so, whatever else is true.
        overdue.filter(|_| !flow.stop.stopped()).unwrap_or(error)
    })
}
