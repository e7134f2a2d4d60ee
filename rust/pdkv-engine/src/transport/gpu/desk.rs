//! One thread for each GPU of the process: it launches what is to be copied there and sees it land. Nobody else waits for a
//! GPU, and nobody but this thread is held up when its driver is slow.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::{BulkSize, Cargo, Courier, Gpu, HostPaths, Landed};

use super::super::work::Program;
use super::super::{Direction, Work};
use super::{GpuLink, reached};
use crate::mover::contained;
use crate::view::lasts;

/// How long after news the thread looks again and again: small copies land sooner than it would wake.
const SPIN: Duration = Duration::from_micros(50);
/// The least and the longest pause between two looks at what is under way; in between a part of how long it has been so.
const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));
const SHARE: u32 = 16;
/// How long a GPU on which nothing could be launched is left alone.
const AGAIN: Duration = Duration::from_secs(5);

/// What is to be copied.
pub(super) struct Order {
    pub(super) work: Arc<Work>,
    /// Who knows what it is copied between.
    pub(super) link: Arc<GpuLink>,
}

/// The thread of one GPU, as those who give it orders hold it. It ends when nobody does and nothing is under way.
pub(crate) struct Desk {
    gpu: Gpu,
    inner: Arc<Inner>,
    /// Whether somebody was told to measure how bytes go best between the host and this GPU, and inside it.
    measured: AtomicBool,
    /// A forked child has none of the threads.
    process: u32,
}

#[derive(Default)]
struct Inner {
    book: Mutex<Book>,
    news: Condvar,
}

#[derive(Default)]
struct Book {
    orders: Vec<Order>,
    closed: bool,
    /// Why nothing could be launched on this GPU when it was last tried, and when that was.
    broken: Option<(Error, Instant)>,
}

impl Inner {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("no holder panics")
    }

    /// What was ordered since the last look; `None` when nobody will order any more. Waits for at most `pause`.
    fn next(&self, pause: Option<Duration>) -> Option<Vec<Order>> {
        let mut book = match pause {
            None => {
                let idle = |book: &mut Book| book.orders.is_empty() && !book.closed;
                self.news.wait_while(self.book(), idle).expect("no holder panics")
            }
            Some(Duration::ZERO) => self.book(),
            Some(pause) => {
                let idle = |book: &mut Book| book.orders.is_empty();
                let waited = self.news.wait_timeout_while(self.book(), pause, idle);
                waited.expect("no holder panics").0
            }
        };
        let over = book.closed && book.orders.is_empty() && pause.is_none();
        (!over).then(|| std::mem::take(&mut book.orders))
    }
}

impl Desk {
    /// The desk of a GPU, one for the whole process.
    ///
    /// # Errors
    /// `Capacity` when the system gives no thread.
    pub(super) fn of(gpu: &Gpu) -> Result<Arc<Self>> {
        static DESKS: Mutex<BTreeMap<u32, Weak<Desk>>> = Mutex::new(BTreeMap::new());
        let process = std::process::id();
        let mut desks = DESKS.lock().unwrap_or_else(PoisonError::into_inner);
        let known = desks.get(&gpu.ordinal()).and_then(Weak::upgrade);
        if let Some(desk) = known.filter(|desk| desk.process == process) {
            return Ok(desk);
        }
        let inner = Arc::new(Inner::default());
        let (mine, on) = (Arc::clone(&inner), gpu.clone());
        crate::mover::spawn(&format!("pdkv-gpu{}", gpu.ordinal()), move || run(&mine, &on))?;
        let desk = Arc::new(Self {
            gpu: gpu.clone(),
            inner,
            measured: AtomicBool::new(false),
            process,
        });
        desks.insert(gpu.ordinal(), Arc::downgrade(&desk));
        Ok(desk)
    }

    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Why nothing can be launched, if that is known. After some seconds whoever orders finds it out anew, unless it will stay so.
    pub(super) fn broken(&self) -> Option<String> {
        let book = self.inner.book();
        let (error, since) = book.broken.as_ref()?;
        (lasts(error) || since.elapsed() < AGAIN).then(|| error.message().to_owned())
    }

    /// Has it measured how bytes go best between the host and this GPU, and inside it, once for the process, in some hundredths of a second: on a
    /// thread of its own, for nobody waits for it. What is not known, a kernel copies that loads and stores.
    pub(super) fn measure(&self) {
        if self.measured.swap(true, Ordering::Relaxed) {
            return;
        }
        let gpu = self.gpu.clone();
        // What fails is not tried again by each transfer, for it takes memory of a GPU that may have none left.
        let measure = move || {
            if let Ok(kernels) = gpu.kernels() {
                let _ = HostPaths::of(kernels);
                if let Ok(BulkSize::Wrong) = BulkSize::of(kernels) {
                    tracing::warn!(
                        gpu = gpu.ordinal(),
                        "the bulk engine wrote wrong bytes and is left alone"
                    );
                }
            }
        };
        if crate::mover::spawn("pdkv-measure", measure).is_err() {
            self.measured.store(false, Ordering::Relaxed);
        }
    }

    /// Takes an order. Its work reports its own end.
    pub(super) fn order(&self, order: Order) {
        self.inner.book().orders.push(order);
        self.inner.news.notify_one();
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.inner.book().closed = true;
        self.inner.news.notify_one();
    }
}

fn run(inner: &Inner, gpu: &Gpu) {
    // At once, for the kernels may have to be compiled: whoever has memory on the GPU will want them.
    let mut courier = contained(|| open(inner, gpu).ok()).unwrap_or_default();
    let mut news = Instant::now();
    loop {
        match contained(|| turn(inner, gpu, &mut courier, &mut news)) {
            Ok(true) => {}
            Ok(false) => return,
            // Orders that it had in hand fail as they are dropped, and what is under way is waited for. Every other transfer on this GPU needs the thread.
            Err(_) => {
                let landed = contained(|| courier.take().map(Courier::close).unwrap_or_default());
                for Landed { owner, outcome } in landed.unwrap_or_default() {
                    let _ = contained(|| end(&owner, outcome));
                }
            }
        }
    }
}

/// Takes in what was ordered, and sees what has landed. `false` when nobody will order any more.
fn turn(inner: &Inner, gpu: &Gpu, courier: &mut Option<Courier<Arc<Work>>>, news: &mut Instant) -> bool {
    let busy = courier.as_ref().is_some_and(Courier::is_busy);
    let Some(orders) = inner.next(busy.then(|| pause(news.elapsed()))) else {
        return false;
    };
    if !orders.is_empty() {
        *news = Instant::now();
    }
    for order in orders {
        dispatch(inner, gpu, courier, order);
    }
    let Some(flying) = courier else { return true };
    let mut landed = flying.give_up(|work| !work.stopped());
    landed.extend(flying.landed());
    if flying.is_broken() {
        // Whether the GPU is of use still shows when its streams are made anew.
        landed.extend(courier.take().map(Courier::close).unwrap_or_default());
    }
    if !landed.is_empty() {
        *news = Instant::now();
    }
    for Landed { owner, outcome } in landed {
        end(&owner, outcome);
    }
    true
}

fn pause(since: Duration) -> Duration {
    if since < SPIN {
        Duration::ZERO
    } else {
        (since / SHARE).clamp(PAUSE.0, PAUSE.1)
    }
}

fn open(inner: &Inner, gpu: &Gpu) -> Result<Courier<Arc<Work>>> {
    let courier = Courier::new(gpu);
    inner.book().broken = courier.as_ref().err().map(|error| (error.clone(), Instant::now()));
    courier
}

/// Launches one order, unless its transfer is to stop.
fn dispatch(inner: &Inner, gpu: &Gpu, courier: &mut Option<Courier<Arc<Work>>>, order: Order) {
    let Order { work, link } = order;
    if work.stopped() {
        return work.leave();
    }
    let known = work.reaches.get().cloned();
    let Some([near, far]) = known.or_else(|| reached(gpu, &work)) else {
        // Something has gone since it was posted.
        return link.order_later(&work);
    };
    // The last share of it must not end on this thread.
    work.reaches.get_or_init(|| [Arc::clone(&near), Arc::clone(&far)]);
    let Program::Joint(plan) = &work.program else {
        let text = "a one-sided link needs both sides' places";
        return end(&work, Err(Error::new(ErrorKind::Internal, "move", text)));
    };
    let (src, dst) = match work.direction {
        Direction::Read => (far, near),
        Direction::Write => (near, far),
    };
    let cargo = Cargo {
        plan: plan.clone(),
        src,
        dst,
        after: work.after.clone(),
        verify: work.shared.config.verify_copies,
        owner: Arc::clone(&work),
    };
    let courier = match courier {
        Some(courier) => courier,
        None => match open(inner, gpu) {
            Ok(made) => courier.insert(made),
            Err(error) => return end(&work, Err(error)),
        },
    };
    // After a panic in there the GPU may be at it: nobody says that it is not, and its memory stays.
    let kept = ManuallyDrop::new(work);
    let sent = courier.post(cargo);
    drop(ManuallyDrop::into_inner(kept));
    if let Err((work, error)) = sent {
        end(&work, Err(error));
    }
}

/// Nothing touches the work's memory any more.
fn end(work: &Arc<Work>, outcome: Result<()>) {
    match outcome {
        Ok(()) => {
            if let Program::Joint(plan) = &work.program {
                work.add_runs(plan.run_count());
            }
            work.add_bytes(work.program.total_bytes());
        }
        Err(error) => work.fail(error),
    }
    work.leave();
}
