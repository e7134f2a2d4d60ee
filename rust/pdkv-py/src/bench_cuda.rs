//! What `make gpu-check` and `pdkv bench` measure on a GPU: the kernels of `cuda/`, and the driver's own copies beside them. Private
//! to the package: these take addresses, and the caller answers for them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Memory;
use pdkv_device::cuda::{
    BulkSize, CopyQueue, Event, Gpu, HostAccess, HostPaths, LINK_BLOCKS, Stream, has_batch, try_kernels,
};
use pdkv_device::kernels::{Axis, Entry, Job, Jobs, Lane, PageTables, Shape, Side, Wishes, launches, read_backs};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::bench::Words;
use crate::buffers;
use crate::enter;
use crate::memory;
use crate::number;
use crate::plan::PyPlan;
use crate::pool::PyPool;

/// A GPU with a queue of its own, for copies that are timed by the GPU's events.
#[pyclass(name = "CudaLoop", module = "pdkv._core", frozen)]
pub(crate) struct PyCudaLoop(Arc<Queue>);

struct Queue {
    gpu: Gpu,
    stream: Stream,
    posts: Mutex<CopyQueue>,
    /// Pools that the GPU was given access to.
    host: Mutex<Vec<Arc<HostAccess>>>,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, CopyQueue> {
        self.posts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A copy by the kernels, posted as the `cuda` transport posts its own.
#[pyclass(name = "CudaCopy", module = "pdkv._core", frozen)]
pub(crate) struct PyCudaCopy {
    queue: Arc<Queue>,
    jobs: Jobs,
    wishes: Wishes,
    kernels: Vec<String>,
    last: Mutex<Last>,
}

/// What the last rounds left.
#[derive(Default)]
struct Last {
    /// Of the pages as they were read and, behind those, as they were placed.
    sums: Vec<u64>,
    post: Duration,
}

/// The pages of one side: bytes from entry to entry, pages of an entry, bytes between those.
type SideNumbers = (u64, u32, u64);
/// Pieces along an axis, and the bytes between them at the source and at the destination.
type AxisNumbers = (u32, u64, u64);

fn shape(chunk_bytes: u64, sides: [SideNumbers; 2], axes: [AxisNumbers; 2]) -> Shape {
    let [src, dst] = sides.map(|(page_stride, parts, part_stride)| Side {
        page_stride,
        parts,
        part_stride,
    });
    let inner_bytes = chunk_bytes * u64::from(axes[1].0);
    let mut logical = [inner_bytes, chunk_bytes].into_iter();
    let axes = axes.map(|(count, src_stride, dst_stride)| Axis {
        count,
        src_stride,
        dst_stride,
        logical_stride: logical.next().unwrap_or_default(),
    });
    Shape {
        chunk_bytes,
        src,
        dst,
        axes,
    }
}

impl PyCudaLoop {
    fn copy_of(&self, jobs: Jobs, wishes: Wishes) -> Result<PyCudaCopy> {
        let mut kernels = Vec::new();
        for job in &jobs.list {
            let entries = launches(job, self.0.gpu.facts(), wishes)?;
            kernels.extend(entries.into_iter().map(|launch| launch.entry.name()));
        }
        for job in jobs.list.iter().filter(|_| wishes.sums) {
            let entries = read_backs(job, self.0.gpu.facts(), wishes)?;
            kernels.extend(entries.into_iter().map(|launch| launch.entry.name()));
        }
        Ok(PyCudaCopy {
            queue: Arc::clone(&self.0),
            jobs,
            wishes,
            kernels,
            last: Mutex::default(),
        })
    }
}

/// Seconds on the GPU for a round of what `ask` asks of the stream.
fn timed(stream: &Stream, rounds: u32, mut ask: impl FnMut() -> Result<()>) -> Result<f64> {
    let (first, last) = (Event::timed(stream.context())?, Event::timed(stream.context())?);
    first.record(stream)?;
    for _ in 0..rounds {
        ask()?;
    }
    last.record(stream)?;
    last.synchronize()?;
    Ok(last.elapsed_us(&first)? / 1e6 / f64::from(rounds.max(1)))
}

#[pymethods]
impl PyCudaLoop {
    #[new]
    #[pyo3(signature = (device=0))]
    fn new(py: Python<'_>, device: u32) -> PyResult<Self> {
        enter::detached(py, || {
            let gpu = Gpu::open(device)?;
            let queue = CopyQueue::new(gpu.kernels()?)?;
            Ok(Self(Arc::new(Queue {
                stream: queue.stream().clone(),
                posts: Mutex::new(queue),
                gpu,
                host: Mutex::default(),
            })))
        })
    }

    /// What the GPU is, and where its kernels come from.
    #[getter]
    fn facts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let origin = enter::detached(py, || Ok(self.0.gpu.kernels()?.origin().to_string()))?;
        let (known, facts) = (self.0.gpu.facts(), PyDict::new(py));
        facts.set_item("name", self.0.gpu.name())?;
        facts.set_item("origin", origin)?;
        facts.set_item("capability", known.capability)?;
        facts.set_item("multiprocessors", known.multiprocessors)?;
        facts.set_item("batched_copies", has_batch(self.0.gpu.context()))?;
        facts.set_item("link_blocks", LINK_BLOCKS)?;
        Ok(facts)
    }

    /// What transfers of this process find measured: how they go between the host and this GPU, and from pieces of how many bytes on by the bulk engine
    /// inside it.
    fn ways<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (host, bulk) = enter::detached(py, || {
            let kernels = self.0.gpu.kernels()?;
            Ok((HostPaths::of(kernels)?, BulkSize::of(kernels)?))
        })?;
        let ways = PyDict::new(py);
        ways.set_item("host", host.to_string())?;
        ways.set_item("bulk", bulk.to_string())?;
        ways.set_item("bulk_from_bytes", bulk.bytes())?;
        Ok(ways)
    }

    /// The names of all kernels that this GPU has.
    #[getter]
    fn kernels(&self) -> Vec<String> {
        Entry::all(self.0.gpu.facts().capability.0)
            .into_iter()
            .map(Entry::name)
            .collect()
    }

    /// Runs every kernel on jobs drawn from a seed, verified, and compares bytes and checksums with the plain twin's; returns their names.
    fn try_kernels(&self, py: Python<'_>, #[pyo3(from_py_with = number::seed)] seed: u64) -> PyResult<Vec<String>> {
        enter::detached(py, || Ok(try_kernels(&self.0.gpu, seed)?.into_iter().collect()))
    }

    /// The handle of the stream.
    #[getter]
    fn stream(&self) -> u64 {
        self.0.stream.address()
    }

    /// Asks the stream for a copy between any memory that the driver reaches. Does not wait.
    fn copy(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::address)] dst: u64,
        #[pyo3(from_py_with = number::address)] src: u64,
        #[pyo3(from_py_with = number::nbytes)] nbytes: u64,
    ) -> PyResult<()> {
        enter::detached(py, || buffers::copied(&self.0.stream, dst, src, nbytes))
    }

    /// Waits for all that the stream was asked.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        enter::detached(py, || self.0.stream.synchronize())
    }

    /// The seconds of one copy of everything at once.
    fn whole(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::address)] dst: u64,
        #[pyo3(from_py_with = number::address)] src: u64,
        #[pyo3(from_py_with = number::nbytes)] nbytes: u64,
        rounds: u32,
    ) -> PyResult<f64> {
        enter::detached(py, || {
            timed(&self.0.stream, rounds, || {
                buffers::copied(&self.0.stream, dst, src, nbytes)
            })
        })
    }

    /// The seconds of copying blocks one by one: in a `"loop"` of copies, or in one `"batch"`.
    #[expect(clippy::too_many_arguments, reason = "private to the package")]
    fn blocks(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::address)] dst: u64,
        #[pyo3(from_py_with = number::address)] src: u64,
        dst_offsets: Words,
        src_offsets: Words,
        #[pyo3(from_py_with = number::nbytes)] block_bytes: u64,
        how: &str,
        rounds: u32,
    ) -> PyResult<f64> {
        let at = |base: u64, offsets: Words| -> Vec<u64> {
            let offsets = offsets.into_inner().into_iter();
            offsets.map(|offset| base.wrapping_add(offset)).collect()
        };
        let (dsts, srcs) = (at(dst, dst_offsets), at(src, src_offsets));
        enter::detached(py, || match how {
            "loop" => timed(&self.0.stream, rounds, || {
                let pieces = dsts.iter().copied().zip(srcs.iter().copied());
                buffers::copied_each(&self.0.stream, pieces, block_bytes)
            }),
            "batch" => {
                let sizes = vec![block_bytes as usize; dsts.len()];
                timed(&self.0.stream, rounds, || {
                    buffers::batched(&self.0.stream, &dsts, &srcs, &sizes)
                })
            }
            how => Err(Error::new(
                ErrorKind::Config,
                "bench",
                format!("`{how}` is no way to copy blocks"),
            )),
        })
    }

    /// Gives the GPU access to a pool of host memory for the life of this loop; returns where the GPU finds it.
    fn access(&self, py: Python<'_>, pool: &Bound<'_, PyPool>) -> PyResult<u64> {
        let memory = pool.get().memory();
        enter::detached(py, || match memory {
            Memory::Device(region) => Ok(region.address()),
            Memory::Host(region) => {
                let access = HostAccess::of(&self.0.gpu, region)?;
                let address = access.device_address();
                self.0.host.lock().unwrap_or_else(PoisonError::into_inner).push(access);
                Ok(address)
            }
        })
    }

    /// Prepares a copy in the kernels' own terms; `benches/gpu_check/jobs.py` says what they are.
    #[pyo3(signature = (*, chunk_bytes, src, dst, axes, lanes, num_pages, src_pages=None, dst_pages=None, sums=false, bulk=false, most_blocks=None))]
    #[expect(clippy::too_many_arguments, reason = "private to the package")]
    fn job(
        &self,
        py: Python<'_>,
        chunk_bytes: u64,
        src: SideNumbers,
        dst: SideNumbers,
        axes: [AxisNumbers; 2],
        lanes: Vec<(u64, u64)>,
        num_pages: u32,
        src_pages: Option<Vec<u32>>,
        dst_pages: Option<Vec<u32>>,
        sums: bool,
        bulk: bool,
        most_blocks: Option<u32>,
    ) -> PyResult<PyCudaCopy> {
        let shape = shape(chunk_bytes, [src, dst], axes);
        let logical = (0..).map(|lane: u64| lane * shape.page_bytes());
        let lanes = lanes.into_iter().zip(logical).map(|((src, dst), logical)| Lane {
            src,
            dst,
            logical,
            bytes: chunk_bytes,
        });
        let job = Job {
            shape,
            lanes: lanes.collect(),
            num_pages,
        };
        let tables = PageTables {
            src: src_pages,
            dst: dst_pages,
        };
        let mut jobs = Jobs::default();
        (jobs.list, jobs.tables) = (vec![job], tables);
        let wishes = Wishes {
            sums,
            bulk: bulk.then_some(0),
            most_blocks,
        };
        enter::detached(py, || self.copy_of(jobs, wishes))
    }

    /// Prepares the copy of a plan; the bases are the addresses of each side's regions.
    #[pyo3(signature = (plan, src_bases, dst_bases, *, sums=false, bulk=false))]
    fn plan(
        &self,
        plan: &Bound<'_, PyPlan>,
        src_bases: Vec<u64>,
        dst_bases: Vec<u64>,
        sums: bool,
        bulk: bool,
    ) -> PyResult<PyCudaCopy> {
        let inner = plan.get().inner();
        enter::detached(plan.py(), move || {
            let jobs = Jobs::of(inner, &src_bases, &dst_bases)?;
            let wishes = Wishes {
                sums,
                bulk: bulk.then_some(0),
                most_blocks: None,
            };
            self.copy_of(jobs, wishes)
        })
    }
}

impl PyCudaCopy {
    /// Copies several times, and waits.
    fn copy(&self, rounds: u32) -> Result<f64> {
        let Queue { stream, .. } = &*self.queue;
        let mut queue = self.queue.lock();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut tickets, mut post) = (Vec::new(), Duration::ZERO);
        let seconds = timed(stream, rounds, || {
            let started = Instant::now();
            let ticket = loop {
                if let Some(ticket) = buffers::posted(&mut queue, &self.jobs, self.wishes)? {
                    break ticket;
                }
                // The tables of earlier rounds leave no room.
                stream.synchronize()?;
            };
            post += started.elapsed();
            tickets.push(ticket);
            Ok(())
        })?;
        for ticket in tickets {
            // The stream has passed it, whether or not its flag is what it should be.
            queue.wait(ticket)?;
            last.sums = queue.take_sums(ticket).unwrap_or_default();
        }
        last.post = post / rounds.max(1);
        Ok(seconds)
    }

    /// Copies once, and looks at nothing but the flag.
    fn told(&self, patience: Duration) -> Result<(u64, u64)> {
        let mut queue = self.queue.lock();
        let posted = buffers::posted(&mut queue, &self.jobs, self.wishes)?;
        let ticket = posted.ok_or_else(|| {
            let what = "earlier copies are still under way";
            Error::new(ErrorKind::Capacity, "bench", what)
        })?;
        let started = Instant::now();
        while queue.flag() < ticket.flag() && started.elapsed() < patience {
            std::hint::spin_loop();
        }
        let found = queue.flag();
        // The sums have come before the flag; without one they are not there.
        if found == ticket.flag() && queue.passed(ticket)? {
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            last.sums = queue.take_sums(ticket).unwrap_or_default();
        }
        Ok((ticket.flag(), found))
    }
}

#[pymethods]
impl PyCudaCopy {
    /// The kernel of each launch.
    #[getter]
    fn kernels(&self) -> Vec<String> {
        self.kernels.clone()
    }

    /// Bytes that a round copies.
    #[getter]
    fn total_bytes(&self) -> u64 {
        self.jobs.total_bytes()
    }

    /// Copies several times, and waits; returns the seconds of one round on the GPU, that of bringing its tables there included.
    fn run(&self, py: Python<'_>, rounds: u32) -> PyResult<f64> {
        enter::detached(py, || self.copy(rounds))
    }

    /// Copies once and waits for the flag alone, so many seconds at most: nobody asks the driver. Returns what the flag should be then, and what it is.
    fn tell(&self, py: Python<'_>, seconds: f64) -> PyResult<(u64, u64)> {
        let patience = enter::duration(py, "seconds", seconds)?;
        enter::detached(py, || self.told(patience))
    }

    /// The host's time for posting one of the last rounds.
    #[getter]
    fn post_us(&self) -> f64 {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.post.as_secs_f64() * 1e6
    }

    /// The checksums of the pages as the last round read them, and as they lay at the destination afterwards.
    #[getter]
    fn sums(&self) -> (Vec<u64>, Vec<u64>) {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (read, placed) = last.sums.split_at(last.sums.len() / 2);
        (read.to_vec(), placed.to_vec())
    }
}

/// Returns address and length of each region of a cache's tensors, as registering them would find them.
#[pyfunction]
#[pyo3(signature = (tensors, *, layout, block_tokens))]
pub(crate) fn cache_regions(
    tensors: &Bound<'_, PyAny>,
    layout: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = number::block_tokens)] block_tokens: u32,
) -> PyResult<Vec<(u64, u64)>> {
    memory::resolved(tensors, layout, block_tokens).map(|resolved| resolved.regions)
}

/// Returns how many GPUs this process may see.
#[pyfunction]
pub(crate) fn cuda_count(py: Python<'_>) -> PyResult<u32> {
    enter::detached(py, Gpu::count)
}
