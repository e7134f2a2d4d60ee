//! The threads that move bytes. A fixed set of copy threads serves all one-sided transfers, chunk
//! by chunk and in turn, so that a large transfer doesn't hold up a small one. Work that may block
//! on a peer (tcp, mapping a peer's pool) runs on threads of its own, made on demand, so that a
//! stalled peer stalls nobody else.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use pdkv_core::{Error, ErrorKind, Result};

/// What a copy thread is to do next with a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// There is more: queue me again.
    Again,
    /// This thread has nothing left to do for the job.
    Over,
}

/// A job that several copy threads work on, one chunk a call.
pub(crate) trait Job: Send + Sync {
    fn step(&self) -> Step;
}

/// How long a thread of the on-demand set waits for new work before it ends.
const IDLE: Duration = Duration::from_secs(10);

struct Queue<T> {
    state: Mutex<QueueState<T>>,
    ready: Condvar,
}

struct QueueState<T> {
    jobs: VecDeque<T>,
    idle: usize,
    closed: bool,
}

impl<T> Queue<T> {
    fn new() -> Self {
        Self {
            state: Mutex::new(QueueState {
                jobs: VecDeque::new(),
                idle: 0,
                closed: false,
            }),
            ready: Condvar::new(),
        }
    }

    /// Queues a job, or gives it back once closed.
    fn push(&self, job: T) -> std::result::Result<(), T> {
        let mut state = self.state.lock().expect("no holder panics");
        if state.closed {
            return Err(job);
        }
        state.jobs.push_back(job);
        drop(state);
        self.ready.notify_one();
        Ok(())
    }

    /// The next job; `None` once closed, or after `limit` without work.
    fn pop(&self, limit: Option<Duration>) -> Option<T> {
        let mut state = self.state.lock().expect("no holder panics");
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state.idle += 1;
            let timed_out;
            (state, timed_out) = match limit {
                None => (self.ready.wait(state).expect("no holder panics"), false),
                Some(limit) => {
                    let (state, result) = self.ready.wait_timeout(state, limit).expect("no holder panics");
                    (state, result.timed_out())
                }
            };
            state.idle -= 1;
            if timed_out && state.jobs.is_empty() {
                return None;
            }
        }
    }

    fn close(&self) {
        self.state.lock().expect("no holder panics").closed = true;
        self.ready.notify_all();
    }
}

type Task = Box<dyn FnOnce() + Send>;

/// Both sets of threads of one engine.
pub(crate) struct Movers {
    copies: Arc<Queue<Arc<dyn Job>>>,
    tasks: Arc<Queue<Task>>,
    threads: usize,
    name: String,
}

impl Movers {
    pub(crate) fn start(name: &str, threads: usize) -> Result<Self> {
        let movers = Self {
            copies: Arc::new(Queue::new()),
            tasks: Arc::new(Queue::new()),
            threads,
            name: name.to_owned(),
        };
        for index in 0..threads {
            let queue = Arc::clone(&movers.copies);
            spawn(&format!("pdkv-copy{index}"), move || {
                while let Some(job) = queue.pop(None) {
                    // What held the job tells; the thread is for all of them.
                    let _ = contained(|| work(&queue, job));
                }
            })?;
        }
        Ok(movers)
    }

    /// How many copy threads there are.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Gives the job to `hands` copy threads. After [`close`](Self::close) the caller does the work, for
    /// somebody waits for its end.
    pub(crate) fn copy(&self, job: &Arc<dyn Job>, hands: usize) {
        for _ in 0..hands.clamp(1, self.threads) {
            if let Err(job) = self.copies.push(Arc::clone(job)) {
                work(&self.copies, job);
            }
        }
    }

    /// Runs something that may block on a peer.
    ///
    /// # Errors
    /// `Capacity` when the system gives no more threads; the task was not run.
    pub(crate) fn task(&self, task: impl FnOnce() + Send + 'static) -> Result<()> {
        let mut state = self.tasks.state.lock().expect("no holder panics");
        if state.idle > state.jobs.len() {
            state.jobs.push_back(Box::new(task));
            drop(state);
            self.tasks.ready.notify_one();
            return Ok(());
        }
        drop(state);
        let queue = Arc::clone(&self.tasks);
        spawn(&format!("pdkv-{}", self.name), move || {
            let mut next: Option<Task> = Some(Box::new(task));
            while let Some(task) = next {
                // What it held has been given back.
                let _ = contained(task);
                next = queue.pop(Some(IDLE));
            }
        })
    }

    /// Lets the threads end once their queues are empty. Does not wait for them.
    pub(crate) fn close(&self) {
        self.copies.close();
        self.tasks.close();
    }
}

impl Drop for Movers {
    fn drop(&mut self) {
        self.close();
    }
}

/// One step, and the next one in turn with other jobs; once the queue is closed, all of them at once.
fn work(queue: &Queue<Arc<dyn Job>>, mut job: Arc<dyn Job>) {
    while job.step() == Step::Again {
        match queue.push(job) {
            Ok(()) => return,
            Err(back) => job = back,
        }
    }
}

/// Runs something whose panic is to end nothing else: what it holds goes, as it does on any way out.
///
/// # Errors
/// `Internal` when it panicked.
pub(crate) fn contained<T>(run: impl FnOnce() -> T) -> Result<T> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|_| Error::new(ErrorKind::Internal, "move", "a thread panicked"))
}

thread_local! {
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// Whether this is a thread of pdkv's, for which somebody may wait.
pub(crate) fn is_ours() -> bool {
    OURS.get()
}

/// Starts a thread with a name that fits the kernel's 15 bytes.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    spawn_sized(name, 512 << 10, body)
}

/// As [`spawn`], with a stack of this many bytes.
pub(crate) fn spawn_sized(name: &str, stack: usize, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let name: String = name.chars().filter(char::is_ascii).take(15).collect();
    std::thread::Builder::new()
        .name(name)
        .stack_size(stack)
        .spawn(move || {
            OURS.set(true);
            body();
        })
        .map(drop)
        .map_err(|error| {
            Error::new(ErrorKind::Capacity, "spawn", "the system gives no more threads")
                .with_hint("raise the limit on processes (`ulimit -u`) or use fewer peers and streams")
                .with_source(error)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    struct Count {
        left: AtomicUsize,
        order: Mutex<mpsc::Sender<usize>>,
        tag: usize,
    }

    impl Job for Count {
        fn step(&self) -> Step {
            self.order.lock().unwrap().send(self.tag).unwrap();
            if self.left.fetch_sub(1, Ordering::Relaxed) > 1 {
                Step::Again
            } else {
                Step::Over
            }
        }
    }

    struct Gate(Mutex<mpsc::Receiver<()>>);

    impl Job for Gate {
        fn step(&self) -> Step {
            self.0.lock().unwrap().recv().unwrap();
            Step::Over
        }
    }

    #[test]
    fn jobs_take_turns() {
        let movers = Movers::start("t", 1).unwrap();
        let (send, receive) = mpsc::channel();
        // Hold the only thread until both jobs are queued, so that the order is certain.
        let (go, gate) = mpsc::channel::<()>();
        let gate: Arc<dyn Job> = Arc::new(Gate(Mutex::new(gate)));
        movers.copy(&gate, 1);
        for tag in 0..2 {
            let job: Arc<dyn Job> = Arc::new(Count {
                left: AtomicUsize::new(3),
                order: Mutex::new(send.clone()),
                tag,
            });
            movers.copy(&job, 1);
        }
        go.send(()).unwrap();
        let order: Vec<_> = receive.iter().take(6).collect();
        assert_eq!(order, [0, 1, 0, 1, 0, 1]);
        movers.close();
    }

    #[test]
    fn jobs_that_come_after_the_close_are_done_all_the_same() {
        let movers = Movers::start("t", 2).unwrap();
        movers.close();
        let (send, receive) = mpsc::channel();
        let job: Arc<dyn Job> = Arc::new(Count {
            left: AtomicUsize::new(3),
            order: Mutex::new(send),
            tag: 9,
        });
        movers.copy(&job, 1);
        assert_eq!(receive.try_iter().collect::<Vec<_>>(), [9, 9, 9]);
    }

    struct Panics;

    impl Job for Panics {
        fn step(&self) -> Step {
            panic!("as the test wants");
        }
    }

    #[test]
    fn what_panics_takes_no_thread_along() {
        let movers = Movers::start("t", 1).unwrap();
        let panics: Arc<dyn Job> = Arc::new(Panics);
        movers.copy(&panics, 1);
        movers.task(|| panic!("as the test wants")).unwrap();
        let (send, receive) = mpsc::channel();
        let job: Arc<dyn Job> = Arc::new(Count {
            left: AtomicUsize::new(2),
            order: Mutex::new(send.clone()),
            tag: 7,
        });
        movers.copy(&job, 1);
        movers.task(move || send.send(7).unwrap()).unwrap();
        drop(job);
        assert_eq!(receive.iter().collect::<Vec<_>>(), [7, 7, 7]);
    }

    #[test]
    fn threads_end_with_their_engine() {
        let movers = Movers::start("t", 2).unwrap();
        let queue = Arc::downgrade(&movers.copies);
        drop(movers);
        while queue.strong_count() > 0 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn blocked_tasks_do_not_hold_up_others() {
        let movers = Movers::start("t", 1).unwrap();
        let (go, gate) = mpsc::channel::<()>();
        movers.task(move || gate.recv().unwrap()).unwrap();
        let (send, receive) = mpsc::channel();
        movers.task(move || send.send(7).unwrap()).unwrap();
        assert_eq!(receive.recv().unwrap(), 7);
        go.send(()).unwrap();
        movers.close();
    }
}
