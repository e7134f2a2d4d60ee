//! The life of one lane, at either end: made in a thread of its own, run until an end of any kind, and
//! taken apart in the order that makes the end a fence. First the worker is destroyed, then the mappings of what was lent, then
//! the work leaves, then memory may go.

use std::net::TcpStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use pdkv_core::capability::Capability;
use pdkv_core::id::PeerKey;
use pdkv_core::lane::Manner;
use pdkv_core::{Error, ErrorKind, Result, Scope};

use super::asks::Asks;
use super::codec::Frame;
use super::control::Control;
use super::desk::Desk;
use super::devices::Devices;
use super::door::{self, Made};
use super::owner::Owner;
use super::puts::Puts;
use crate::shared::Shared;
use crate::transport::Work;

/// Time to make a lane. Loading UCX at both ends is part of it, seconds on a host with many adapters.
pub(super) const SETUP: Duration = Duration::from_secs(30);
/// How long operations of a work that was stopped may take to end. Past it the lane ends, since only the
/// end of its worker takes them back.
pub(super) const DRAIN: Duration = Duration::from_secs(5);
/// Calls of UCX between two looks at the side channel.
const PROGRESS: usize = 32;
/// UCX keeps much on the stack while it looks at the machine.
const STACK: usize = 2 << 20;

/// What an initiator learns of a lane once it stands.
pub(super) struct Agreed {
    pub(super) capability: Capability,
    pub(super) detail: String,
}

/// What one end does on a lane.
pub(super) trait Role {
    /// The peer said something.
    fn hear(&mut self, desk: &mut Desk, made: &Made, frame: Frame) -> Result<()>;

    /// Does what can be done now; says whether anything was.
    fn step(&mut self, desk: &mut Desk, made: &Made) -> Result<bool>;

    /// Whether flags of transfers are to be looked at while nothing happens.
    fn watches(&self) -> bool;

    /// Lets go of everything of UCX's. What it returns is kept until the worker is gone.
    fn give_up(self: Box<Self>) -> Rest;
}

/// What a role leaves behind: work to be failed, and whatever else must outlive the worker.
#[derive(Default)]
pub(super) struct Rest {
    pub(super) works: Vec<Arc<Work>>,
    pub(super) permits: Vec<crate::transport::serving::Permit>,
    pub(super) lent: Vec<Arc<pdkv_ucx::MemoryHandle>>,
}

/// Makes and runs a lane towards a peer; `dial` opens its side channel. What is to be done with it `first` comes before
/// any transfer.
///
/// # Errors
/// `Capacity` when the system gives no thread.
pub(super) fn initiate(
    shared: &Arc<Shared>,
    control: &Arc<Control>,
    dial: impl FnOnce() -> Result<TcpStream> + Send + 'static,
    ready: Sender<Result<Agreed>>,
    devices: &Arc<Devices>,
    first: impl FnOnce(&mut Desk, &Made) + Send + 'static,
) -> Result<()> {
    let (shared, mine, devices) = (Arc::clone(shared), Arc::clone(control), Arc::clone(devices));
    spawn(control, move || {
        let deadline = Instant::now() + SETUP;
        let made = dial().and_then(|stream| {
            let mut desk = Desk::new(&shared, &mine, stream)?;
            let made = door::knock(&mut desk, deadline)?;
            Ok((desk, made))
        });
        let (mut desk, made) = match made {
            Ok(made) => made,
            Err(error) => {
                // Whoever waits for the answer may have given up.
                let _ = ready.send(Err(error));
                return;
            }
        };
        let agreed = Agreed {
            capability: Capability::lane(made.manner, made.carrier),
            detail: made.detail.clone(),
        };
        let role: Box<dyn Role> = match made.manner {
            Manner::OneSided => Box::new(Puts::new(devices)),
            Manner::ActiveMessages => Box::new(Asks::default()),
        };
        if ready.send(Ok(agreed)).is_err() {
            mine.end();
        }
        first(&mut desk, &made);
        run(desk, made, role);
    })
}

/// Makes and runs a lane that a peer has opened.
///
/// # Errors
/// `Capacity` when the peer has too many, or the system gives no thread.
pub(crate) fn serve(shared: &Arc<Shared>, peer: PeerKey, stream: TcpStream) -> Result<()> {
    let control = Control::new()?;
    shared.lanes.enter(peer, &control)?;
    // The peer may have been lost since its token was looked up; then nobody else would end this.
    if !shared.lock().peers.contains_key(&peer) {
        control.end();
    }
    let (shared, mine) = (Arc::clone(shared), Arc::clone(&control));
    spawn(&control, move || {
        let deadline = Instant::now() + SETUP;
        let made = Desk::new(&shared, &mine, stream).and_then(|mut desk| {
            let made = door::answer(&mut desk, peer, deadline)?;
            Ok((desk, made))
        });
        match made {
            Ok((desk, made)) => {
                let owner = Owner::new(peer, made.manner);
                run(desk, made, Box::new(owner));
            }
            Err(error) => tracing::debug!(peer = %peer, %error, "no lane"),
        }
    })
}

/// Starts a lane's thread. However it ends, the lane is gone then.
fn spawn(control: &Arc<Control>, body: impl FnOnce() + Send + 'static) -> Result<()> {
    struct Gone(Arc<Control>);
    impl Drop for Gone {
        fn drop(&mut self) {
            self.0.set_gone();
            let over = || Error::new(ErrorKind::PeerLost, "lane", "the lane ended");
            for work in self.0.close() {
                work.fail(over());
                work.leave();
            }
        }
    }
    let gone = Gone(Arc::clone(control));
    crate::mover::spawn_sized("pdkv-lane", STACK, move || {
        let gone = gone;
        body();
        drop(gone);
    })
}

/// Runs a lane until it ends, and takes it apart.
pub(super) fn run(mut desk: Desk, made: Made, mut role: Box<dyn Role>) {
    // A panic must not skip what follows: it is the fence.
    let turned = catch_unwind(AssertUnwindSafe(|| turn(&mut desk, &made, &mut *role)));
    let error = match turned {
        Ok(Ok(never)) => match never {},
        Ok(Err(error)) => error,
        Err(_) => Error::new(ErrorKind::Internal, "lane", "the lane's thread panicked"),
    };
    tracing::debug!(%error, "lane ended");
    let unbegun = desk.control.close();
    let rest = role.give_up();
    drop(made.inbox);
    drop(made.endpoint);
    made.worker.destroy();
    // A process that exits waits for lanes to be gone and no longer: by then UCX is to know nothing of this one. The memory itself may take its time.
    let lent: Vec<_> = rest.lent.iter().map(|handle| handle.region().clone()).collect();
    drop(rest.lent);
    drop(made.context);
    desk.control.set_gone();
    drop(rest.permits);
    drop(lent);
    for work in rest.works.into_iter().chain(unbegun) {
        work.fail(error.clone());
        work.leave();
    }
}

/// Whether a lane lives on after an operation of it failed: UCX remembers what a connection can't carry, so one that
/// failed to carry something is not tried again.
///
/// # Errors
/// The error, if it is one of the connection.
pub(super) fn lives(error: Error) -> Result<()> {
    if error.scope() == Scope::Endpoint {
        Err(error)
    } else {
        Ok(())
    }
}

enum Never {}

fn turn(desk: &mut Desk, made: &Made, role: &mut dyn Role) -> Result<Never> {
    desk.stir();
    loop {
        desk.listen()?;
        // A look at the side channel costs as much as a small message.
        let mut busy = (0..PROGRESS).take_while(|_| made.worker.progress()).count() > 0;
        while let Some(frame) = desk.heard() {
            role.hear(desk, made, frame)?;
            busy = true;
        }
        busy |= role.step(desk, made)?;
        if let Some(error) = made.endpoint.as_ref().and_then(pdkv_ucx::Endpoint::failure) {
            return Err(error);
        }
        if busy {
            desk.stir();
        } else {
            desk.rest(Some(&made.worker), role.watches(), None)?;
        }
    }
}

/// The lane ends because something that was stopped long ago is still under way.
pub(super) fn stuck() -> Error {
    Error::new(
        ErrorKind::PeerLost,
        "lane",
        format!("the peer didn't finish within {DRAIN:?} what was stopped"),
    )
}
