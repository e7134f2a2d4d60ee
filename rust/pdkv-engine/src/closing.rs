//! The end of an engine: one caller brings it about, and others who want it meanwhile wait for that.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use pdkv_core::{Error, ErrorKind};

use crate::engine::engines;
use crate::shared::Shared;

/// How long close() waits for peers that write into our memory and for our movers, and after them for the progress
/// thread to let go of the port. Those that are well need milliseconds; a machine that is very busy gives them late.
pub(crate) const CLOSE_WAIT: Duration = Duration::from_secs(5);

/// How far the end of an engine has come.
#[derive(Default)]
pub(crate) struct Ending {
    stage: Mutex<Stage>,
    over: Condvar,
    /// Those that wait for the end.
    #[cfg(test)]
    waiting: std::sync::atomic::AtomicUsize,
}

#[derive(Clone, Copy, Default)]
enum Stage {
    #[default]
    Open,
    /// On that thread.
    Closing(ThreadId),
    /// And whether nothing touched the memory any more.
    Closed(bool),
}

impl Ending {
    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is the caller who is to close.
    fn begin(&self) -> bool {
        let mut stage = self.stage();
        let first = matches!(*stage, Stage::Open);
        if first {
            *stage = Stage::Closing(std::thread::current().id());
        }
        first
    }

    fn end(&self, quiet: bool) {
        *self.stage() = Stage::Closed(quiet);
        self.over.notify_all();
    }

    /// What whoever closes now answers in the end; `false` when that takes longer than `patience`. `None` where nobody closes any more, or the
    /// closing waits for this very thread, as far as is known.
    fn await_end(&self, patience: Duration) -> Option<bool> {
        let stage = self.stage();
        match *stage {
            Stage::Closing(by) if by != std::thread::current().id() && !crate::mover::is_ours() => {}
            _ => return None,
        }
        #[cfg(test)]
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let waited = self
            .over
            .wait_timeout_while(stage, patience, |stage| matches!(stage, Stage::Closing(_)));
        let (stage, _) = waited.unwrap_or_else(PoisonError::into_inner);
        Some(matches!(*stage, Stage::Closed(true)))
    }
}

/// Whoever goes without an end has others wait no longer than it did.
struct Closer<'a>(&'a Ending);

impl Drop for Closer<'_> {
    fn drop(&mut self) {
        let stage = *self.0.stage();
        if matches!(stage, Stage::Closing(_)) {
            self.0.end(false);
        }
    }
}

/// Closes an engine, or waits for whoever does, as long as that one may take. Gives whether nothing touches the memory any more.
pub(crate) fn close(shared: &Arc<Shared>, patience: Duration) -> bool {
    if !shared.ending.begin() {
        let answer = shared.ending.await_end(2 * patience);
        return answer.unwrap_or_else(|| is_quiet(shared));
    }
    let _closer = Closer(&shared.ending);
    shared.closed.store(true, Ordering::Release);
    let deadline = Instant::now() + patience;
    let left = || deadline.saturating_duration_since(Instant::now());
    shared.drive(|state, now| state.node.release_all(now));
    // Writers of offers are told to stop, and say when they have.
    wait_until(left(), || shared.lock().node.writers() == 0);
    let peers: Vec<_> = shared.lock().peers.keys().copied().collect();
    let error = Error::new(
        ErrorKind::Closed,
        "close",
        format!("engine `{}` was closed", shared.name),
    );
    shared.pipes.part(&error.clone().with("closed_by", "here"));
    for peer in peers {
        shared.hang_up(peer, &error);
    }
    // With the peers all transfers have ended.
    shared.completions.close();
    shared.pipes.close();
    shared.movers.close();
    wait_until(left(), || is_quiet(shared));
    let quiet = is_quiet(shared);
    shared.ucx.close();
    shared.gpus.close();
    shared.stagings.close();
    // Whoever lent us memory gets it back now, not when the last handle goes.
    shared.registry.clear();
    shared.halted.store(true, Ordering::Release);
    // The progress thread looks at the flag when it wakes.
    let _ = shared.waker.wake();
    shared.stopped.wait(patience);
    shared.ending.end(quiet);
    quiet
}

/// Whether neither this engine nor a peer that was let write into an offer touches the memory any more.
fn is_quiet(shared: &Shared) -> bool {
    let runs_none = shared.runs_none() && shared.lanes.none() && shared.pipes.none_runs() && shared.pipes.none_shut();
    runs_none && shared.lock().node.writers() == 0
}

/// Looks every millisecond; what is waited for nearly always holds at once.
fn wait_until(patience: Duration, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() && started.elapsed() < patience {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Ends every lane of this process and waits for their threads to leave UCX. The process is about to exit.
pub(crate) fn end_lanes() {
    crate::transport::ucx::refuse_lanes();
    let engines = engines();
    for engine in &engines {
        engine.lanes.end_all();
    }
    wait_until(CLOSE_WAIT, || engines.iter().all(|engine| engine.lanes.none()));
    // Nobody is to be the last owner here: dropping an engine while the process exits is not worth a risk.
    std::mem::forget(engines);
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn who_comes_meanwhile_gets_the_answer_of_who_came_first() {
        for quiet in [true, false] {
            let ending = Ending::default();
            assert_eq!(ending.await_end(LONG), None, "nobody closes");
            assert!(ending.begin());
            assert_eq!(ending.await_end(LONG), None, "whoever closes would wait for itself");
            std::thread::scope(|scope| {
                let others = [0, 1].map(|_| {
                    scope.spawn(|| {
                        assert!(!ending.begin());
                        ending.await_end(LONG)
                    })
                });
                while ending.waiting.load(Ordering::SeqCst) < 2 {
                    std::thread::yield_now();
                }
                ending.end(quiet);
                assert_eq!(others.map(|other| other.join().unwrap()), [Some(quiet); 2]);
            });
            assert_eq!(ending.await_end(LONG), None, "it is over");
        }
    }

    #[test]
    fn who_panics_while_it_closes_has_closed_without_an_answer() {
        let ending = Ending::default();
        assert!(ending.begin());
        std::thread::scope(|scope| {
            let closes = scope.spawn(|| {
                let _closer = Closer(&ending);
                panic!("as the test wants");
            });
            assert!(closes.join().is_err());
        });
        assert!(matches!(*ending.stage(), Stage::Closed(false)));
    }

    #[test]
    fn nobody_waits_longer_than_he_may_nor_does_a_thread_of_ours() {
        let ending = Arc::new(Ending::default());
        assert!(ending.begin());
        std::thread::scope(|scope| {
            let other = scope.spawn(|| ending.await_end(Duration::from_millis(1)));
            assert_eq!(other.join().unwrap(), Some(false));
        });
        let (say, said) = std::sync::mpsc::channel();
        let mine = Arc::clone(&ending);
        crate::mover::spawn("t", move || say.send(mine.await_end(LONG)).unwrap()).unwrap();
        assert_eq!(said.recv().unwrap(), None);
    }
}
