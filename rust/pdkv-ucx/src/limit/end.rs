//! One end of the loop in a thread of its own: it runs loops, and lets the other end's go on while it waits. An end
//! that waits sleeps until somebody wants it, so that it takes nothing from whatever is measured beside the loop.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::{EventFd, HostRegion};

use super::{Blocks, OPERATION, copy};
use crate::{Context, Direction, Endpoint, ErrorMode, MemoryHandle, RemoteKey, Worker};

/// How long it looks for work before it sleeps, as the other end's operations may need its help at once.
const SPIN: Duration = Duration::from_millis(1);

/// One end. Its thread ends when it is dropped.
#[derive(Debug)]
pub struct LoopEnd {
    commands: Mutex<Option<Sender<Command>>>,
    /// Rung after every command, and when there will be none any more.
    bell: Arc<EventFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
    address: Vec<u8>,
    key: Vec<u8>,
    base: u64,
    len: u64,
}

enum Command {
    Connect(Peer, Sender<Result<()>>),
    Run(Job, Sender<Result<Duration>>),
}

/// How the other end is reached.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The address of its worker.
    pub address: Vec<u8>,
    /// The key of its memory.
    pub key: Vec<u8>,
    /// Where that begins.
    pub base: u64,
    /// How long it is.
    pub len: u64,
}

/// A loop to run.
#[derive(Clone, Debug)]
pub struct Job {
    /// Which way.
    pub direction: Direction,
    /// Where each block begins here.
    pub local: Vec<u64>,
    /// Where it begins there.
    pub remote: Vec<u64>,
    /// How long each is.
    pub block_bytes: u64,
    /// Operations under way at once.
    pub window: usize,
}

impl LoopEnd {
    /// Maps the region and starts the thread.
    ///
    /// # Errors
    /// Whatever UCX says.
    pub fn open(context: &Context, region: &Arc<HostRegion>) -> Result<Self> {
        let memory = context.map(&Arc::clone(region).into())?;
        let key = memory.pack()?;
        let (ready, opened) = channel();
        let (commands, inbox) = channel();
        let bell = Arc::new(EventFd::new()?);
        let (context, heard) = (context.clone(), Arc::clone(&bell));
        let thread = std::thread::Builder::new()
            .name("pdkv-ucx-limit".to_owned())
            .spawn(
                move || match Worker::create(&context).and_then(|worker| Ok((worker.address()?, worker))) {
                    Ok((address, worker)) => {
                        let _ = ready.send(Ok(address));
                        serve(&worker, &memory, &inbox, &heard);
                    }
                    Err(error) => {
                        let _ = ready.send(Err(error));
                    }
                },
            )
            .map_err(|error| Error::new(ErrorKind::Capacity, OPERATION, format!("no thread: {error}")))?;
        let address = opened.recv().map_err(|_| gone())??;
        Ok(Self {
            commands: Mutex::new(Some(commands)),
            bell,
            thread: Mutex::new(Some(thread)),
            address,
            key,
            base: region.address(),
            len: region.len(),
        })
    }

    /// What the other end needs to connect to this one.
    pub fn describe(&self) -> Peer {
        Peer {
            address: self.address.clone(),
            key: self.key.clone(),
            base: self.base,
            len: self.len,
        }
    }

    /// Connects to the other end. Both ends do, before either runs a loop.
    ///
    /// # Errors
    /// Whatever UCX says.
    pub fn connect(&self, peer: Peer) -> Result<()> {
        self.ask(|answer| Command::Connect(peer, answer))
    }

    /// Runs a loop and tells how long it took.
    ///
    /// # Errors
    /// As [`copy`], and `Config` before `connect`.
    pub fn run(&self, job: Job) -> Result<Duration> {
        self.ask(|answer| Command::Run(job, answer))
    }

    fn ask<T>(&self, command: impl FnOnce(Sender<Result<T>>) -> Command) -> Result<T> {
        let (answer, answered) = channel();
        let queue = self.commands.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let sent = queue.is_some_and(|queue| queue.send(command(answer)).is_ok());
        if !sent {
            return Err(gone());
        }
        self.bell.notify();
        answered.recv().map_err(|_| gone())?
    }

    /// Ends the thread, and with it whatever is under way; idempotent.
    pub fn close(&self) {
        drop(self.commands.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.bell.notify();
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join();
        }
    }
}

impl Drop for LoopEnd {
    fn drop(&mut self) {
        self.close();
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Closed, OPERATION, "this end of the loop was closed")
}

/// Carries out commands, and progresses the worker in between: emulated lanes need both ends.
fn serve(worker: &Worker, memory: &Arc<MemoryHandle>, commands: &Receiver<Command>, bell: &EventFd) {
    let mut other: Option<(Endpoint, RemoteKey)> = None;
    let mut idle_since = Instant::now();
    loop {
        match commands.try_recv() {
            Ok(Command::Connect(peer, answer)) => {
                let made = connect(worker, &peer).map(|made| other = Some(made));
                let _ = answer.send(made);
                idle_since = Instant::now();
            }
            Ok(Command::Run(job, answer)) => {
                let _ = answer.send(run(worker, other.as_ref(), memory, &job));
                idle_since = Instant::now();
            }
            Err(TryRecvError::Disconnected) => return,
            Err(TryRecvError::Empty) => {
                if worker.progress() {
                    idle_since = Instant::now();
                } else if idle_since.elapsed() > SPIN && worker.arm().unwrap_or(false) {
                    sleep(worker, bell);
                }
            }
        }
    }
}

fn connect(worker: &Worker, peer: &Peer) -> Result<(Endpoint, RemoteKey)> {
    let endpoint = worker.connect(&peer.address, ErrorMode::None)?;
    let key = endpoint.unpack(&peer.key, peer.base, peer.len)?;
    Ok((endpoint, key))
}

fn run(
    worker: &Worker,
    other: Option<&(Endpoint, RemoteKey)>,
    memory: &Arc<MemoryHandle>,
    job: &Job,
) -> Result<Duration> {
    let Some((endpoint, remote)) = other else {
        return Err(Error::new(ErrorKind::Config, OPERATION, "the loop is not connected"));
    };
    let blocks = Blocks {
        local: &job.local,
        remote: &job.remote,
        bytes: job.block_bytes,
    };
    copy(worker, endpoint, job.direction, memory, remote, blocks, job.window)
}

/// Sleeps until UCX has something or the bell rings.
fn sleep(worker: &Worker, bell: &EventFd) {
    let mut wait = [worker.event_fd(), bell.as_fd()].map(|event| libc::pollfd {
        fd: event.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    });
    // SAFETY: two descriptors, alive through the call; whatever comes back, the caller looks again.
    unsafe { libc::poll(wait.as_mut_ptr(), wait.len() as libc::nfds_t, -1) };
    bell.drain();
}
