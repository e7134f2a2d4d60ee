//! Memory that Python's objects hold, let go of with the interpreter free: freeing a GPU's waits for all that runs on it.

use pdkv_device::Memory;
use pyo3::prelude::*;

/// Memory of a pool.
pub(crate) struct Held(Option<Memory>);

impl Held {
    pub(crate) fn new(memory: Memory) -> Self {
        Self(Some(memory))
    }

    pub(crate) fn get(&self) -> &Memory {
        self.0.as_ref().expect("it is taken only when this is dropped")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(memory @ Memory::Device(_)) = self.0.take() else {
            return;
        };
        let mut memory = Some(memory);
        // Without an interpreter, at the end of the process, nobody is held up; then it goes where this returns.
        let _ = Python::try_attach(|py| py.detach(|| drop(memory.take())));
    }
}
