//! What tests over the stand-in begin with: it is theirs alone, and what they made is gone in the end.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{MutexGuard, PoisonError};

use pdkv_device::cuda::{Context, CopyQueue, Driver, Gpu, Kernels, Sources, Stream};

use crate::standin::{ALONE, IMAGE, alive, since, whole};

/// The stand-in, for one test at a time.
pub(crate) struct Alone {
    pub(crate) driver: Driver,
    pub(crate) path: &'static Path,
    living: BTreeMap<String, i64>,
    _guard: MutexGuard<'static, ()>,
}

impl Alone {
    /// `None`, with the reason printed, where there is no compiler.
    pub(crate) fn begin() -> Option<Self> {
        let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (driver, path) = whole()?;
        Some(Self {
            driver,
            path,
            living: alive(path),
            _guard: guard,
        })
    }

    /// The first GPU, for good: what it keeps does not count as left.
    pub(crate) fn gpu(&self) -> Gpu {
        Gpu::open_on(&self.driver, 0).unwrap()
    }

    /// A context of the first GPU.
    pub(crate) fn context(&self) -> Context {
        self.driver.device(0).unwrap().context().unwrap()
    }

    /// A queue in a context, and its stream.
    pub(crate) fn queue(&self) -> (Context, CopyQueue, Stream) {
        let context = self.context();
        // SAFETY: the stand-in's image, whole; its kernels are those of this release.
        let kernels = unsafe { Kernels::load(&context, IMAGE) }.unwrap();
        let queue = CopyQueue::new(&kernels).unwrap();
        let stream = queue.stream().clone();
        (context, queue, stream)
    }

    /// Fails unless all is gone that was made since the beginning.
    pub(crate) fn nothing_is_left(&self) {
        let left = since(self.path, &self.living);
        assert!(left.is_empty(), "{left:?}");
    }
}

/// A GPU of a stand-in with its kernels.
pub(crate) fn loaded(driver: &Driver, ordinal: u32) -> Gpu {
    let gpu = Gpu::open_on(driver, ordinal).unwrap();
    let image = std::env::temp_dir().join(format!("pdkv-driver-image-{}", std::process::id()));
    std::fs::write(&image, IMAGE).unwrap();
    let sources = Sources {
        named: Some(image.clone()),
        ..Sources::of_process()
    };
    gpu.kernels_from(&sources).unwrap();
    std::fs::remove_file(&image).unwrap();
    gpu
}
