//! What `pdkv doctor` asks about GPUs: the driver, each device, where its kernels come from, what memory of it others can map.
//! Only for a process of its own: the driver keeps threads, and whoever forks after it has started is lost.

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::{
    self, AdapterAccess, BulkSize, DeviceBuffer, DeviceRegion, Gpu, Handle, HostPaths, IpcHandle, Kernels, Presence,
    Sources, has_batch,
};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::enter;

/// Something that works, and how; or why not, and what to do.
struct Verdict {
    good: bool,
    text: String,
    hint: Option<String>,
}

impl Verdict {
    fn of(found: Result<String>) -> Self {
        match found {
            Ok(text) => Self {
                good: true,
                text,
                hint: None,
            },
            Err(error) => Self {
                good: false,
                text: error.message().to_owned(),
                hint: error.hint().map(str::to_owned),
            },
        }
    }

    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("good", self.good)?;
        dict.set_item("text", &self.text)?;
        dict.set_item("hint", self.hint.as_deref())?;
        Ok(dict)
    }
}

/// A device, looked at.
struct Looked {
    name: String,
    uuid: String,
    capability: (u32, u32),
    isolated: Option<String>,
    batched: bool,
    kernels: Verdict,
    /// How bytes were measured to go fastest; none without kernels.
    ways: Option<Verdict>,
    ipc: Verdict,
    pool: Verdict,
    adapters: AdapterAccess,
    /// Why nobody can make it see what an adapter wrote, if so.
    unseen: Option<String>,
}

impl Looked {
    fn at(ordinal: u32) -> Result<Self> {
        let gpu = Gpu::open(ordinal)?;
        Ok(Self {
            name: gpu.name().to_owned(),
            uuid: pdkv_core::hex::encode(&gpu.uuid()),
            capability: gpu.facts().capability,
            isolated: gpu.isolated().map(str::to_owned),
            batched: has_batch(gpu.context()),
            kernels: Verdict::of(gpu.kernels().map(|kernels| kernels.origin().to_string())),
            ways: gpu.kernels().ok().map(|kernels| Verdict::of(ways(kernels))),
            ipc: Verdict::of(ipc(&gpu)),
            pool: Verdict::of(pool(&gpu)),
            adapters: gpu.adapter_access()?,
            unseen: gpu.may_see_arrivals().err(),
        })
    }
}

/// What transfers would find measured.
fn ways(kernels: &Kernels) -> Result<String> {
    let (host, bulk) = (HostPaths::of(kernels)?, BulkSize::of(kernels)?);
    let text = format!("between the host and it {host}; inside it the bulk engine {bulk}");
    match bulk {
        BulkSize::Wrong => Err(Error::new(ErrorKind::Device, "measure copies", text).with_hint("please report this")),
        _ => Ok(text),
    }
}

/// Memory of `cudaMalloc`, as most of torch's is.
fn ipc(gpu: &Gpu) -> Result<String> {
    let buffer = DeviceBuffer::new(gpu.context(), BYTES)?;
    IpcHandle::of(gpu.context(), buffer.address()).map(|_| "memory of cudaMalloc, by CUDA IPC".to_owned())
}

/// Memory of pdkv's own, which is laid as torch's expandable segments are.
fn pool(gpu: &Gpu) -> Result<String> {
    let region = DeviceRegion::allocate(gpu, BYTES as u64)?;
    let extents = region.share()?;
    let by = match extents.first().map(|extent| &extent.handle) {
        Some(Handle::Fd(_)) => "file descriptor",
        Some(Handle::Fabric(_)) => "fabric handle",
        Some(Handle::Ipc(_)) | None => "CUDA IPC",
    };
    Ok(format!("pools of pdkv, by {by}"))
}

const BYTES: usize = 2 << 20;

/// Returns what there is: `present` and `text` of the driver, its `version`, the `gpus`, and the `kernels`' sources.
#[pyfunction]
pub(crate) fn cuda_probe(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let (presence, sources) = enter::detached(py, || Ok((cuda::probe(), Sources::of_process().look())))?;
    let found = PyDict::new(py);
    let devices = match presence {
        Presence::Absent { reason } => {
            found.set_item("present", false)?;
            found.set_item("text", reason)?;
            found.set_item("version", py.None())?;
            0
        }
        Presence::Present { version, devices } => {
            found.set_item("present", true)?;
            found.set_item("text", format!("CUDA {}.{}, devices: {devices}", version.0, version.1))?;
            found.set_item("version", version)?;
            devices
        }
    };
    let gpus = PyList::empty(py);
    for ordinal in 0..devices {
        gpus.append(gpu(py, ordinal)?)?;
    }
    found.set_item("gpus", gpus)?;
    let places = PyList::empty(py);
    for attempt in sources {
        let (good, text) = match attempt.found {
            Ok(text) => (true, text),
            Err(text) => (false, text),
        };
        places.append((attempt.place, good, text))?;
    }
    found.set_item("kernels", places)?;
    Ok(found)
}

fn gpu(py: Python<'_>, ordinal: u32) -> PyResult<Bound<'_, PyDict>> {
    let gpu = PyDict::new(py);
    gpu.set_item("ordinal", ordinal)?;
    match enter::detached(py, || Ok(Looked::at(ordinal)))? {
        Err(error) => {
            gpu.set_item("error", error.message())?;
            gpu.set_item("hint", error.hint())?;
        }
        Ok(looked) => {
            gpu.set_item("error", py.None())?;
            gpu.set_item("name", looked.name)?;
            gpu.set_item("uuid", looked.uuid)?;
            gpu.set_item("capability", format!("{}.{}", looked.capability.0, looked.capability.1))?;
            gpu.set_item("isolated", looked.isolated)?;
            gpu.set_item("batched_copies", looked.batched)?;
            gpu.set_item("kernels", looked.kernels.to_dict(py)?)?;
            let ways = looked.ways.map(|ways| ways.to_dict(py)).transpose()?;
            gpu.set_item("ways", ways)?;
            gpu.set_item("ipc", looked.ipc.to_dict(py)?)?;
            gpu.set_item("pool", looked.pool.to_dict(py)?)?;
            gpu.set_item("dma_buf", looked.adapters.dma_buf)?;
            gpu.set_item("peer_memory", looked.adapters.peer_memory)?;
            gpu.set_item("unseen", looked.unseen)?;
        }
    }
    Ok(gpu)
}
