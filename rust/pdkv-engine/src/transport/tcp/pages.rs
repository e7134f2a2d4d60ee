//! Pages on their way to or from a socket: those of the host as they lie, those of a GPU by way of pinned host memory.
//!
//! Whoever names pages names them in the order of the stream. Stages are few, and both ends of a stream may need one, so there are rules
//! by which two engines never wait for each other's. What goes out and what comes in have shelves of their own. A sender holds its stage
//! from the first page of a GPU to the end of the payload. A receiver takes one only when bytes are there, so that whoever sends them has
//! one already, and gives it back as soon as they are placed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::{DeviceRegion, Gpu, Stage, Staging};
use pdkv_device::{IoBatch, Memory};

use super::socket::Socket;

/// The stages of an engine: those to send from and those to receive into, half of the bytes each.
pub(crate) struct Stagings {
    bytes: u64,
    /// By the number of the GPU, and whether they are to send from.
    shelves: Mutex<BTreeMap<(u32, bool), Arc<Staging>>>,
}

impl Stagings {
    /// `bytes` for each GPU; 0 refuses to stage.
    pub(crate) fn new(bytes: u64) -> Self {
        Self {
            bytes,
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

    fn of(&self, gpu: &Gpu, sends: bool) -> Arc<Staging> {
        let mut shelves = self.shelves.lock().expect("no holder panics");
        let staging = shelves.entry((gpu.ordinal(), sends));
        Arc::clone(staging.or_insert_with(|| Staging::new(gpu, self.bytes.div_ceil(2))))
    }
}

/// Which way a payload goes on which stream.
#[derive(Clone, Copy)]
pub(crate) struct Flow<'a> {
    pub(crate) stagings: &'a Stagings,
    pub(crate) socket: &'a Socket,
    /// From our pages into the socket, or back.
    pub(crate) sends: bool,
    /// Ends it.
    pub(crate) stop: &'a AtomicBool,
}

/// The payload of one request.
pub(crate) struct Pages<'a> {
    batch: IoBatch<'a>,
    stage: Option<Stage>,
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
            stage: None,
            pieces: 0,
            staged: 0,
        }
    }

    /// The next bytes. Moves what was named before where there is no room for more.
    ///
    /// # Errors
    /// As [`Pages::finish`], and `Region` for bytes that do not lie in the memory.
    pub(crate) fn push(&mut self, flow: Flow<'_>, memory: &'a Memory, offset: u64, len: u64) -> Result<()> {
        match memory {
            Memory::Host(region) => {
                self.flush_stage(flow)?;
                if self.batch.push(region, offset, len)? {
                    self.flush_batch(flow)?;
                }
                Ok(())
            }
            Memory::Device(region) => {
                self.flush_batch(flow)?;
                self.push_device(flow, region, offset, len)
            }
        }
    }

    fn push_device(&mut self, flow: Flow<'_>, region: &Arc<DeviceRegion>, offset: u64, len: u64) -> Result<()> {
        let gpu = region.gpu();
        if self
            .stage
            .as_ref()
            .is_some_and(|stage| stage.gpu().ordinal() != gpu.ordinal())
        {
            self.flush_stage(flow)?;
            self.stage = None;
        }
        let mut done = 0;
        while done < len {
            let stage = if let Some(stage) = &mut self.stage {
                stage
            } else {
                if !flow.sends {
                    flow.socket.wait_readable(flow.stop);
                }
                self.stage.insert(flow.stagings.of(gpu, flow.sends).take(flow.stop)?)
            };
            done += stage.push(region, offset + done, len - done)?;
            if stage.is_full() {
                self.flush_stage(flow)?;
            }
        }
        Ok(())
    }

    /// Moves what is left. Gives back the memory of the batch.
    ///
    /// # Errors
    /// `TransferCancelled` when stopped, `PeerLost` when the stream ended, `Device` when the GPU fails.
    pub(crate) fn finish(&mut self, flow: Flow<'_>) -> Result<()> {
        self.flush_stage(flow)?;
        self.stage = None;
        self.flush_batch(flow)
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
        carry(&mut self.batch, flow)
    }

    fn flush_stage(&mut self, flow: Flow<'_>) -> Result<()> {
        let Some(stage) = self.stage.as_mut().filter(|stage| stage.bytes() > 0) else {
            return Ok(());
        };
        if flow.sends {
            stage.pack()?;
        }
        let bytes = stage.bytes();
        let host = Arc::clone(stage.host()?);
        let mut whole = IoBatch::new();
        whole.push(&host, 0, bytes)?;
        carry(&mut whole, flow)?;
        if !flow.sends {
            // What came is of a claim that may have ended while the last bytes were on their way.
            if flow.stop.load(Ordering::Acquire) {
                let message = "stopped before the last bytes were placed";
                return Err(Error::new(ErrorKind::TransferCancelled, "receive", message));
            }
            stage.unpack()?;
        }
        stage.clear();
        if !flow.sends {
            self.stage = None;
        }
        self.pieces += 1;
        self.staged += bytes;
        Ok(())
    }
}

fn carry(batch: &mut IoBatch<'_>, flow: Flow<'_>) -> Result<()> {
    if flow.sends {
        batch.send_all(flow.socket.fd(), &[], flow.stop).map(drop)
    } else {
        batch.recv_all(flow.socket.fd(), flow.stop).map(drop)
    }
}
