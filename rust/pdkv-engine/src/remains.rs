//! What has ended may have been the last to hold memory, and letting go of memory takes its time: unmapping much of it, and of a GPU's the driver may wait
//! for whatever the LLM engine computes. Who must not wait (the progress thread, a GPU's, whoever has the lock of the state) hands it on here.

use std::any::Any;
use std::sync::Arc;

use pdkv_device::Memory;
use pdkv_device::cuda::Reach;

use crate::lists::{Memories, Regions};
use crate::mover::Movers;

/// Things nobody else holds any more.
#[derive(Default)]
pub(crate) struct Remains(Vec<Box<dyn Any + Send>>);

impl Remains {
    /// Gives up a share of something; if it was the last, the thing is kept until [`bury`](Self::bury).
    pub(crate) fn add<T: Send + 'static>(&mut self, share: Arc<T>) {
        if let Some(last) = Arc::into_inner(share) {
            self.0.push(Box::new(last));
        }
    }

    /// The same for several.
    pub(crate) fn add_all<T: Send + 'static>(&mut self, shares: impl IntoIterator<Item = Arc<T>>) {
        for share in shares {
            self.add(share);
        }
    }

    /// The same for a share of a list of regions of a peer.
    pub(crate) fn add_regions(&mut self, list: Arc<Regions>) {
        self.add_all(Arc::into_inner(list).unwrap_or_default().into_list());
    }

    /// The same for a share of a list of memory.
    pub(crate) fn add_memories(&mut self, list: Arc<Memories>) {
        self.add_memory(Arc::into_inner(list).unwrap_or_default().into_list());
    }

    /// The same for memory.
    pub(crate) fn add_memory(&mut self, list: impl IntoIterator<Item = Memory>) {
        for memory in list {
            match memory {
                Memory::Host(region) => self.add(region),
                Memory::Device(region) => self.add(region),
            }
        }
    }

    /// The same for what a GPU reaches.
    pub(crate) fn add_reaches(&mut self, list: impl IntoIterator<Item = Reach>) {
        for reach in list {
            match reach {
                Reach::Device(region) => self.add(region),
                Reach::Mapping(mapping) => self.add(mapping),
                Reach::Host(access) => self.add(access),
            }
        }
    }

    /// Drops them on a thread that nobody waits for; there is work for it only where something was kept.
    pub(crate) fn bury(self, movers: &Movers) {
        if !self.0.is_empty() {
            // Without a thread for it, it is dropped with the refused task, here.
            let _ = movers.task(move || drop(self));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Mutex, mpsc};

    /// Tells on which thread it goes, once it may.
    struct Slow(Mutex<mpsc::Receiver<()>>, mpsc::Sender<std::thread::ThreadId>);

    impl Drop for Slow {
        fn drop(&mut self) {
            self.0.lock().unwrap().recv().unwrap();
            self.1.send(std::thread::current().id()).unwrap();
        }
    }

    #[test]
    fn only_the_last_share_is_kept_and_dropped_elsewhere() {
        let movers = Movers::start("t", 1).unwrap();
        let ((go, gate), (told, tells)) = (mpsc::channel(), mpsc::channel());
        let share = Arc::new(Slow(Mutex::new(gate), told));
        let mut remains = Remains::default();
        remains.add(Arc::clone(&share));
        assert!(remains.0.is_empty(), "somebody else holds it");
        remains.add(share);
        remains.bury(&movers);
        go.send(()).unwrap();
        assert_ne!(tells.recv().unwrap(), std::thread::current().id());
    }
}
