//! From tensors to a layout: axes as the operator names them, facts as the tensors state them.

use super::{Axis, KvLayout, KvLayoutParts, LayerLayout, Plane, refuse};
use crate::Result;
use crate::dtype::DType;

/// What a tensor says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorFacts {
    /// Name of the layer, for messages.
    pub name: String,
    /// Address of the element with index 0 on all axes.
    pub address: u64,
    /// Elements along each axis.
    pub shape: Vec<u64>,
    /// Bytes from an element to the next along each axis.
    pub strides_bytes: Vec<i64>,
    /// Bytes of one element.
    pub item_bytes: u64,
    /// Element type.
    pub dtype: DType,
}

/// The tensors of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerTensors {
    /// One tensor: K and V joined in the content, on a `K` axis, or MLA.
    Joined(TensorFacts),
    /// K and V as two tensors with the same axes.
    Split {
        /// Keys.
        k: TensorFacts,
        /// Values.
        v: TensorFacts,
    },
}

impl LayerTensors {
    /// Name of the layer.
    pub fn name(&self) -> &str {
        match self {
            Self::Joined(tensor) | Self::Split { k: tensor, .. } => &tensor.name,
        }
    }
}

/// What the operator says the axes of the tensors are: a wish until the tensors agree.
///
/// ```
/// use pdkv_core::dtype::DType;
/// use pdkv_core::layout::{LayerTensors, LayoutRequest, TensorFacts};
///
/// let tensor = TensorFacts {
///     name: "layers.0".to_owned(),
///     address: 0x10000,
///     shape: vec![100, 2, 16, 256],
///     strides_bytes: vec![16384, 8192, 512, 2],
///     item_bytes: 2,
///     dtype: DType::BF16,
/// };
/// let resolved = LayoutRequest::parse("BHNC", 16)?.resolve(&[LayerTensors::Joined(tensor)])?;
/// assert_eq!(resolved.layout.block_bytes(), 16384);
/// assert_eq!(resolved.regions, [(0x10000, 1_638_400)]);
/// # Ok::<(), pdkv_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutRequest {
    axes: Vec<Axis>,
    block_tokens: u32,
}

/// A layout and the memory it lies in.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The layout, rebased on `regions`.
    pub layout: KvLayout,
    /// Address and length of each region, ascending. Tensors that overlap or touch share one:
    /// block-outermost layers are views of one allocation.
    pub regions: Vec<(u64, u64)>,
}

/// One tensor read along its axes: planes by address, strides, counts.
struct Reading {
    planes: Vec<u64>,
    extent: u64,
    counts: [u64; 3],
    strides: [u64; 3],
    content_bytes: u64,
    dtype: DType,
}

impl LayoutRequest {
    /// Reads axes such as `"BHNC"`, `"KBNHC"`, `"BNC"` (one head) or `"BC"` (raw pages, whose
    /// content holds all `block_tokens` tokens). The order is that of the tensor's shape; where
    /// the bytes are is told by its strides.
    ///
    /// # Errors
    /// `Layout` for an unknown, doubled or missing letter, or zero `block_tokens`.
    pub fn parse(axes: &str, block_tokens: u32) -> Result<Self> {
        if block_tokens == 0 {
            return Err(refuse("block_tokens is `0`"));
        }
        Ok(Self {
            axes: Axis::parse_all(axes)?,
            block_tokens,
        })
    }

    /// The axes, in the order of the tensor's shape.
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// Tokens a block holds.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Reads the layers' tensors along the axes.
    ///
    /// # Errors
    /// `Layout` when a tensor contradicts the axes, differs from the first layer in size or dtype,
    /// has a negative or overlapping stride or a content that is not contiguous, or shares bytes
    /// with another one.
    pub fn resolve(&self, tensors: &[LayerTensors]) -> Result<Resolved> {
        self.resolve_apart(tensors, &[])
    }

    /// The same for memory that comes in pieces: no region begins on one side of a border and ends on the other, unless
    /// a tensor does. Borders are addresses, ascending: allocations of a GPU often touch, and are shared one by one.
    ///
    /// # Errors
    /// As [`LayoutRequest::resolve`].
    pub fn resolve_apart(&self, tensors: &[LayerTensors], borders: &[u64]) -> Result<Resolved> {
        let mut layers = Vec::with_capacity(tensors.len());
        for layer in tensors {
            layers.push(self.read_layer(layer)?);
        }
        let Some(first) = layers.first() else {
            return Err(refuse("there are no layers"));
        };
        let first_name = tensors[0].name();
        for (layer, tensors) in layers.iter().zip(tensors) {
            first.expect_like(layer, tensors.name(), first_name)?;
        }
        let regions = merge_extents(&layers, borders);
        let place = |address: u64| {
            let region = regions.partition_point(|&(start, _)| start <= address) - 1;
            Plane {
                region: region as u32,
                offset: address - regions[region].0,
            }
        };
        let has_tokens = self.axes.contains(&Axis::Token);
        let layout = KvLayout::from_parts(KvLayoutParts {
            dtype: first.dtype,
            num_blocks: narrow(first.counts[0], "blocks")?,
            num_heads: narrow(first.counts[1], "heads")?,
            block_tokens: self.block_tokens,
            token_rows: if has_tokens { self.block_tokens } else { 1 },
            content_bytes: first.content_bytes,
            layers: layers
                .iter()
                .map(|layer| LayerLayout {
                    planes: layer.planes.iter().map(|&address| place(address)).collect(),
                    block_stride: layer.strides[0],
                    head_stride: layer.strides[1],
                    token_stride: layer.strides[2],
                })
                .collect(),
            layer_names: tensors.iter().map(|layer| layer.name().to_owned()).collect(),
            region_bytes: regions.iter().map(|&(_, len)| len).collect(),
        })?;
        Ok(Resolved { layout, regions })
    }

    fn read_layer(&self, layer: &LayerTensors) -> Result<Reading> {
        match layer {
            LayerTensors::Joined(tensor) => self.read(tensor),
            LayerTensors::Split { k, v } => {
                if self.axes.contains(&Axis::Kv) {
                    return Err(refuse(format!(
                        "layer `{}` is split in K and V but its axes have a `K`",
                        k.name
                    ))
                    .with_hint("leave `K` out of the axes"));
                }
                let (mut keys, values) = (self.read(k)?, self.read(v)?);
                keys.expect_like(&values, &v.name, &k.name)?;
                if keys.strides != values.strides {
                    return Err(refuse(format!(
                        "K and V of layer `{}` have strides `{:?}` and `{:?}`",
                        k.name, keys.strides, values.strides
                    )));
                }
                keys.planes.extend(values.planes);
                Ok(keys)
            }
        }
    }

    fn read(&self, tensor: &TensorFacts) -> Result<Reading> {
        let name = &tensor.name;
        let letters: String = self.axes.iter().map(|axis| axis.letter()).collect();
        if tensor.shape.len() != self.axes.len() || tensor.strides_bytes.len() != self.axes.len() {
            return Err(refuse(format!(
                "layer `{name}` has shape `{:?}`, which is not `{letters}`",
                tensor.shape
            )));
        }
        if tensor.item_bytes == 0 || (tensor.dtype != DType::Raw && tensor.item_bytes != tensor.dtype.size_bytes()) {
            return Err(refuse(format!(
                "layer `{name}` has items of `{}` bytes, `{}` has `{}`",
                tensor.item_bytes,
                tensor.dtype,
                tensor.dtype.size_bytes()
            )));
        }
        let along = |axis: Axis| -> Result<(u64, u64)> {
            let Some(index) = self.axes.iter().position(|&other| other == axis) else {
                return Ok((1, 0));
            };
            let (count, stride) = (tensor.shape[index], tensor.strides_bytes[index]);
            if count == 0 {
                return Err(refuse(format!("layer `{name}` is empty along `{}`", axis.letter())));
            }
            if count == 1 {
                return Ok((1, 0));
            }
            match u64::try_from(stride) {
                Ok(stride) if stride > 0 => Ok((count, stride)),
                _ => Err(refuse(format!(
                    "layer `{name}` has stride `{stride}` along `{}`, only positive ones can hold a cache",
                    axis.letter()
                ))),
            }
        };
        let (elements, step) = along(Axis::Content)?;
        if elements > 1 && step != tensor.item_bytes {
            return Err(refuse(format!(
                "layer `{name}` has elements of `{}` bytes every `{step}` bytes along `C`, they must be contiguous",
                tensor.item_bytes
            ))
            .with_hint("name the axis that is contiguous `C`, or pass raw pages with axes `BC`"));
        }
        let (blocks, heads, tokens) = (along(Axis::Block)?, along(Axis::Head)?, along(Axis::Token)?);
        if self.axes.contains(&Axis::Token) && tokens.0 != u64::from(self.block_tokens) {
            return Err(refuse(format!(
                "layer `{name}` has `{}` tokens along `N` but block_tokens is `{}`",
                tokens.0, self.block_tokens
            ))
            .with_hint("the tensor may count the engine's kernel blocks: block_tokens is the size along `N`"));
        }
        let too_large = || {
            refuse(format!(
                "layer `{name}` of shape `{:?}` is beyond 64 bits",
                tensor.shape
            ))
        };
        let content_bytes = elements.checked_mul(tensor.item_bytes).ok_or_else(too_large)?;
        let extent = [blocks, heads, tokens]
            .iter()
            .try_fold(content_bytes, |extent, &(count, stride)| {
                extent.checked_add((count - 1).checked_mul(stride)?)
            })
            .ok_or_else(too_large)?;
        let mut planes = vec![tensor.address];
        if self.axes.contains(&Axis::Kv) {
            let (count, stride) = along(Axis::Kv)?;
            if count != 2 {
                return Err(refuse(format!("layer `{name}` has `{count}` along `K`, must be 2")));
            }
            planes.push(tensor.address.checked_add(stride).ok_or_else(too_large)?);
        }
        if tensor.address == 0 || planes.iter().any(|plane| plane.checked_add(extent).is_none()) {
            return Err(refuse(format!(
                "layer `{name}` of `{extent}` bytes can't lie at address `{}`",
                tensor.address
            )));
        }
        Ok(Reading {
            planes,
            extent,
            counts: [blocks.0, heads.0, tokens.0],
            strides: [blocks.1, heads.1, tokens.1],
            content_bytes,
            dtype: tensor.dtype,
        })
    }
}

impl Reading {
    /// Refuses `other` unless it differs in addresses and strides only.
    fn expect_like(&self, other: &Self, name: &str, first: &str) -> Result<()> {
        let pairs = [
            ("blocks", self.counts[0], other.counts[0]),
            ("heads", self.counts[1], other.counts[1]),
            ("tokens", self.counts[2], other.counts[2]),
            ("content bytes", self.content_bytes, other.content_bytes),
        ];
        for (what, expected, found) in pairs {
            if expected != found {
                return Err(refuse(format!(
                    "`{name}` has `{found}` {what}, `{first}` has `{expected}`"
                )));
            }
        }
        if self.dtype != other.dtype {
            return Err(refuse(format!(
                "`{name}` has dtype `{}`, `{first}` has `{}`",
                other.dtype, self.dtype
            )));
        }
        Ok(())
    }
}

fn narrow(count: u64, what: &str) -> Result<u32> {
    u32::try_from(count).map_err(|_| refuse(format!("`{count}` {what} are more than 32 bits can count")))
}

/// The union of all planes' extents, ascending, as (address, length). Extents that only touch are not joined at a border.
fn merge_extents(layers: &[Reading], borders: &[u64]) -> Vec<(u64, u64)> {
    let mut extents: Vec<(u64, u64)> = layers
        .iter()
        .flat_map(|layer| layer.planes.iter().map(|&address| (address, layer.extent)))
        .collect();
    extents.sort_unstable();
    let mut regions: Vec<(u64, u64)> = Vec::new();
    for (address, len) in extents {
        match regions.last_mut() {
            Some((start, bytes))
                if address < *start + *bytes
                    || (address == *start + *bytes && borders.binary_search(&address).is_err()) =>
            {
                *bytes = (*bytes).max(address + len - *start);
            }
            _ => regions.push((address, len)),
        }
    }
    regions
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
