//! From Python tensors to memory that the engine can register. What a tensor is gets decided in
//! `pdkv.memory`; here its facts become regions, and memory inside a pool is recognised as such.

use std::sync::Arc;

use pdkv_core::dtype::DType;
use pdkv_core::layout::{KvLayout, LayerTensors, LayoutRequest, Resolved, TensorFacts};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::HostRegion;
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
}

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

/// The region of one dense tensor, and whether its owner forbids writing.
pub(crate) fn tensor(py: Python<'_>, facts: &Facts, adopt: bool) -> PyResult<(Arc<HostRegion>, bool)> {
    let keep = facts.keep.clone_ref(py);
    enter::detached(py, || {
        let len = facts.dense()?;
        refuse_adoption(facts, adopt)?;
        Ok((region(facts.address, len, adopt, keep)?, facts.readonly))
    })
}

fn refuse_adoption(facts: &Facts, adopt: bool) -> Result<()> {
    let why = match (facts.pinned, facts.readonly) {
        (true, _) => "a device driver has pinned its pages",
        (_, true) => "it is read-only",
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
fn region(address: u64, len: u64, adopt: bool, keep: Py<PyAny>) -> Result<Arc<HostRegion>> {
    match HostRegion::find_shared(address, len) {
        Some((pool, offset)) => pool.part(offset, len),
        None => buffers::foreign(address, len, adopt, keep),
    }
}

/// The tensors of a KV cache: where they lie and what holds them.
pub(crate) struct CacheMemory {
    pub(crate) layout: KvLayout,
    pub(crate) memory: Vec<Arc<HostRegion>>,
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

    fn resolve(&self, block_tokens: u32) -> Result<Resolved> {
        let tensors = self.layers.iter().map(Layer::tensors).collect::<Result<Vec<_>>>()?;
        LayoutRequest::parse(&self.axes, block_tokens)?.resolve(&tensors)
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
    let collected = Collected::of(tensors, layout)?;
    enter::attached(tensors.py(), || Ok(collected.resolve(block_tokens)?.layout))
}

/// The layout of tensors and the regions that hold them.
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
    let resolved = enter::attached(py, || collected.resolve(block_tokens))?;
    let keeps: Vec<Py<PyAny>> = resolved.regions.iter().map(|_| keeps.clone_ref(py)).collect();
    enter::detached(py, || {
        for facts in collected.facts() {
            refuse_adoption(facts, adopt)?;
        }
        let memory = resolved
            .regions
            .iter()
            .zip(keeps)
            .map(|(&(address, len), keep)| region(address, len, adopt, keep))
            .collect::<Result<_>>()?;
        let readonly = collected.facts().any(|facts| facts.readonly);
        Ok(CacheMemory {
            layout: resolved.layout,
            memory,
            readonly,
        })
    })
}
