//! From Python tensors to memory that the engine can register. What a tensor is gets decided in
//! `pdkv.memory`; here its facts become regions, and memory inside a pool is recognised as such. On which GPU memory
//! lies is asked of the driver, whatever the tensor says.

use pdkv_core::dtype::DType;
use pdkv_core::layout::{KvLayout, LayerTensors, LayoutRequest, Resolved, TensorFacts};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::{Driver, Gpu, pointer_facts};
use pdkv_device::{HostRegion, Memory};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::blocks;
use crate::buffers;
use crate::enter;
use crate::errors;

/// `pdkv.memory.MemoryFacts`, field by field.
#[derive(FromPyObject)]
pub(crate) struct Facts {
    address: u64,
    shape: Vec<u64>,
    strides: Vec<i64>,
    itemsize: u64,
    dtype: String,
    readonly: bool,
    pinned: bool,
    keep: Py<PyAny>,
    device: String,
    stream: Option<u64>,
}

/// What `MemoryFacts.device` says of host memory.
const CPU: &str = "cpu";

impl Facts {
    /// Asks Python for the memory behind `tensor`.
    pub(crate) fn of(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        let facts = py
            .import(pyo3::intern!(py, "pdkv.memory"))?
            .call_method1(pyo3::intern!(py, "describe"), (tensor,))?;
        facts.extract().map_err(|_| {
            // The fields are ours; what they hold is what a foreign object says about itself.
            let what = format!(
                "a `{}` says of its memory what can't be: {facts}",
                blocks::type_name(tensor)
            );
            errors::to_python(py, &Error::new(ErrorKind::Region, "register", what))
        })
    }

    /// The GPU that holds the memory; `None` for the host's.
    fn gpu(&self) -> Result<Option<Gpu>> {
        if self.device == CPU {
            return Ok(None);
        }
        let refuse = |what: String| Error::new(ErrorKind::Region, "register", what).with("address", self.address);
        let Some(gpu) = Gpu::holding(self.address)? else {
            // Without a driver that is the reason, whatever the tensor says.
            Driver::open()?;
            return Err(refuse(format!(
                "the CUDA driver knows no memory of a tensor on `{}`",
                self.device
            ))
            .with_hint("was it freed, or made in another process?"));
        };
        let found = name(gpu.ordinal());
        if self.device != "cuda" && self.device != found {
            let what = format!(
                "a tensor says that it lies on `{}`, the CUDA driver says `{found}`",
                self.device
            );
            return Err(refuse(what));
        }
        Ok(Some(gpu))
    }

    /// Waits for what the tensor's owner has under way on it.
    fn arrive(&self, gpu: Option<&Gpu>) -> Result<()> {
        match (gpu, self.stream) {
            (Some(gpu), Some(stream)) => buffers::waited_for(gpu, stream),
            _ => Ok(()),
        }
    }

    /// The tensor as the planner sees it.
    fn tensor(&self, name: &str) -> Result<TensorFacts> {
        Ok(TensorFacts {
            name: name.to_owned(),
            address: self.address,
            shape: self.shape.clone(),
            strides_bytes: self.strides.clone(),
            item_bytes: self.itemsize,
            dtype: self.dtype.parse::<DType>()?,
        })
    }

    /// The bytes from first to last, when the elements fill them without a gap.
    fn dense(&self) -> Result<u64> {
        let mut axes: Vec<(u64, i64)> = self.shape.iter().copied().zip(self.strides.iter().copied()).collect();
        axes.retain(|&(extent, _)| extent != 1);
        axes.sort_unstable_by_key(|&(_, stride)| stride);
        let mut len = self.itemsize;
        for (extent, stride) in axes {
            if u64::try_from(stride) != Ok(len) {
                let what = format!(
                    "a tensor of shape {:?} and strides {:?} has gaps",
                    self.shape, self.strides
                );
                return Err(Error::new(ErrorKind::Layout, "register", what)
                    .with_hint("register the whole allocation and name parts of it by `region.span(offset, nbytes)`"));
            }
            len = len.checked_mul(extent).ok_or_else(|| too_large(&self.shape))?;
        }
        if len == 0 {
            Err(Error::new(ErrorKind::Layout, "register", "the tensor is empty"))
        } else {
            Ok(len)
        }
    }
}

fn too_large(shape: &[u64]) -> Error {
    Error::new(
        ErrorKind::Layout,
        "register",
        format!("a tensor of shape {shape:?} is larger than memory"),
    )
}

/// The memory of one dense tensor, and whether its owner forbids writing. Waits for what its owner has under way.
pub(crate) fn tensor(py: Python<'_>, facts: &Facts, adopt: bool) -> PyResult<(Memory, bool)> {
    let keep = facts.keep.clone_ref(py);
    enter::detached(py, || {
        let len = facts.dense()?;
        let gpu = facts.gpu()?;
        refuse_adoption(facts, adopt)?;
        facts.arrive(gpu.as_ref())?;
        Ok((region(gpu.as_ref(), facts.address, len, adopt, keep)?, facts.readonly))
    })
}

fn refuse_adoption(facts: &Facts, adopt: bool) -> Result<()> {
    let why = match (facts.device != CPU, facts.pinned, facts.readonly) {
        (true, ..) => "it is a GPU's",
        (_, true, _) => "a device driver has pinned its pages",
        (.., true) => "it is read-only",
        _ => return Ok(()),
    };
    if !adopt {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Region,
        "adopt",
        format!("this memory can't be moved in place: {why}"),
    )
    .with_hint("register it without `adopt`, or allocate the tensor in `engine.allocate(...)`"))
}

/// Memory inside a pool becomes a part of the pool; other memory is wrapped, or adopted.
fn region(gpu: Option<&Gpu>, address: u64, len: u64, adopt: bool, keep: Py<PyAny>) -> Result<Memory> {
    if let Some(gpu) = gpu {
        return buffers::on_device(gpu, address, len, keep).map(Memory::Device);
    }
    match HostRegion::find_shared(address, len) {
        Some((pool, offset)) => pool.part(offset, len),
        None => buffers::foreign(address, len, adopt, keep),
    }
    .map(Memory::Host)
}

/// A GPU by its number, as torch names it.
pub(crate) fn name(ordinal: u32) -> String {
    format!("cuda:{ordinal}")
}

/// Reads where to allocate: `None` for the host, else the number of a GPU.
pub(crate) fn parse(device: Option<&str>) -> Result<Option<u32>> {
    match device.map(|device| device.split_once(':').unwrap_or((device, "0"))) {
        None | Some((CPU, "0")) => Ok(None),
        Some(("cuda", number)) if number.bytes().all(|digit| digit.is_ascii_digit()) => {
            number.parse().map(Some).map_err(|_| no_device(device))
        }
        Some(_) => Err(no_device(device)),
    }
}

fn no_device(device: Option<&str>) -> Error {
    let what = format!("`device` is `{}`", device.unwrap_or_default());
    Error::new(ErrorKind::Config, "allocate", what)
        .with_hint("accepted are `cpu`, `cuda`, `cuda:0`, `cuda:1` and so on")
}

/// The number of the GPU that memory lies on.
pub(crate) fn device_of(memory: &Memory) -> Option<u32> {
    match memory {
        Memory::Host(_) => None,
        Memory::Device(region) => Some(region.gpu().ordinal()),
    }
}

/// The tensors of a KV cache: where they lie and what holds them.
pub(crate) struct CacheMemory {
    pub(crate) layout: KvLayout,
    pub(crate) memory: Vec<Memory>,
    pub(crate) readonly: bool,
}

/// `pdkv.layout.Layer`, field by field.
#[derive(FromPyObject)]
struct Layer {
    name: String,
    first: Facts,
    second: Option<Facts>,
}

/// Layers read along their axes, not yet tied to regions.
struct Collected {
    axes: String,
    layers: Vec<Layer>,
}

impl Collected {
    fn of(tensors: &Bound<'_, PyAny>, layout: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = tensors.py();
        let found = py
            .import(pyo3::intern!(py, "pdkv.layout"))?
            .call_method1(pyo3::intern!(py, "collect"), (tensors, layout))?;
        let (axes, layers) = found.extract()?;
        Ok(Self { axes, layers })
    }

    fn facts(&self) -> impl Iterator<Item = &Facts> {
        self.layers
            .iter()
            .flat_map(|layer| std::iter::once(&layer.first).chain(&layer.second))
    }

    fn resolve(&self, block_tokens: u32, borders: &[u64]) -> Result<Resolved> {
        let tensors = self.layers.iter().map(Layer::tensors).collect::<Result<Vec<_>>>()?;
        LayoutRequest::parse(&self.axes, block_tokens)?.resolve_apart(&tensors, borders)
    }

    /// The one place where all tensors lie: a GPU, or the host.
    fn gpu(&self) -> Result<Option<Gpu>> {
        let mut first: Option<(&Facts, Option<Gpu>)> = None;
        for facts in self.facts() {
            let gpu = facts.gpu()?;
            let Some((one, known)) = &first else {
                first = Some((facts, gpu));
                continue;
            };
            if known.as_ref().map(Gpu::ordinal) != gpu.as_ref().map(Gpu::ordinal) {
                let what = format!("one cache has tensors on `{}` and on `{}`", one.device, facts.device);
                return Err(Error::new(ErrorKind::Region, "register", what)
                    .with_hint("register a cache for each, with the shard that it is"));
            }
        }
        Ok(first.and_then(|(_, gpu)| gpu))
    }

    /// Where allocations of the GPU begin that are shared as a whole, one handle each.
    fn borders(&self, gpu: Option<&Gpu>) -> Result<Vec<u64>> {
        let Some(gpu) = gpu else {
            return Ok(Vec::new());
        };
        let mut borders = Vec::new();
        for facts in self.facts() {
            if let Some(allocation) = pointer_facts(gpu.context(), facts.address)?.filter(|allocation| allocation.ipc) {
                borders.push(allocation.base);
            }
        }
        borders.sort_unstable();
        borders.dedup();
        Ok(borders)
    }

    /// Waits for what the tensors' owner has under way on them.
    fn arrive(&self, gpu: Option<&Gpu>) -> Result<()> {
        let mut streams = Vec::new();
        for facts in self.facts().filter(|facts| facts.stream.is_some()) {
            if !streams.contains(&facts.stream) {
                facts.arrive(gpu)?;
                streams.push(facts.stream);
            }
        }
        Ok(())
    }
}

impl Layer {
    fn tensors(&self) -> Result<LayerTensors> {
        let first = self.first.tensor(&self.name)?;
        Ok(match &self.second {
            None => LayerTensors::Joined(first),
            Some(second) => LayerTensors::Split {
                k: first,
                v: second.tensor(&self.name)?,
            },
        })
    }
}

/// The layout of tensors, without registering them.
pub(crate) fn layout(tensors: &Bound<'_, PyAny>, layout: &Bound<'_, PyAny>, block_tokens: u32) -> PyResult<KvLayout> {
    resolved(tensors, layout, block_tokens).map(|resolved| resolved.layout)
}

/// The layout of tensors, and address and length of each of its regions.
pub(crate) fn resolved(tensors: &Bound<'_, PyAny>, layout: &Bound<'_, PyAny>, block_tokens: u32) -> PyResult<Resolved> {
    let collected = Collected::of(tensors, layout)?;
    enter::detached(tensors.py(), || {
        let borders = collected.borders(collected.gpu()?.as_ref())?;
        collected.resolve(block_tokens, &borders)
    })
}

/// The layout of tensors and the regions that hold them. Waits for what their owner has under way.
pub(crate) fn cache(
    tensors: &Bound<'_, PyAny>,
    layout: &Bound<'_, PyAny>,
    block_tokens: u32,
    adopt: bool,
) -> PyResult<CacheMemory> {
    let py = tensors.py();
    let collected = Collected::of(tensors, layout)?;
    let keeps: Vec<Py<PyAny>> = collected.facts().map(|facts| facts.keep.clone_ref(py)).collect();
    let keeps = PyTuple::new(py, keeps)?.into_any().unbind();
    let (gpu, resolved) = enter::detached(py, || {
        let gpu = collected.gpu()?;
        let borders = collected.borders(gpu.as_ref())?;
        let resolved = collected.resolve(block_tokens, &borders)?;
        Ok((gpu, resolved))
    })?;
    let keeps: Vec<Py<PyAny>> = resolved.regions.iter().map(|_| keeps.clone_ref(py)).collect();
    enter::detached(py, || {
        for facts in collected.facts() {
            refuse_adoption(facts, adopt)?;
        }
        collected.arrive(gpu.as_ref())?;
        let memory = resolved
            .regions
            .iter()
            .zip(keeps)
            .map(|(&(address, len), keep)| region(gpu.as_ref(), address, len, adopt, keep))
            .collect::<Result<_>>()?;
        let readonly = collected.facts().any(|facts| facts.readonly);
        Ok(CacheMemory {
            layout: resolved.layout,
            memory,
            readonly,
        })
    })
}
