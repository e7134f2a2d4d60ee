//! Where the bytes of (layer, k|v, block, head, token) are.
//!
//! A [`LayoutRequest`] is a wish: what the operator says the axes of the tensors are. A
//! [`KvLayout`] is a fact: offsets and strides in regions, checked so that no two of its pieces
//! share a byte and none leaves its region. Strides come from the tensors or from the wire, never
//! from a guess. No address is kept here: a region is an index.

mod axis;
mod disjoint;
mod meaning;
mod packed;
mod request;

use std::sync::Arc;

pub use axis::Axis;
pub use meaning::{Difference, Meaning};
pub use request::{LayerTensors, LayoutRequest, Resolved, TensorFacts};

use crate::dtype::DType;
use crate::{Error, ErrorKind, Result};

/// The most layers a layout may have; far above any model, low enough to bound the cost of checks.
pub const MAX_LAYERS: usize = 1024;

/// A layout error met while making a layout.
fn refuse(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Layout, "layout", message)
}

/// Where block 0, head 0, token 0 of one k, v or joined plane starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plane {
    /// Index of the region.
    pub region: u32,
    /// Byte offset in the region.
    pub offset: u64,
}

/// Planes and strides of one layer. A stride along an axis with one element is 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerLayout {
    /// One plane (K and V joined in the content, or MLA) or two (K, then V).
    pub planes: Vec<Plane>,
    /// Bytes from a block to the next.
    pub block_stride: u64,
    /// Bytes from a head to the next.
    pub head_stride: u64,
    /// Bytes from a token row to the next.
    pub token_stride: u64,
}

/// The plain fields of a [`KvLayout`], as they are built or come off the wire, unchecked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KvLayoutParts {
    /// Element type.
    pub dtype: DType,
    /// Blocks in every plane.
    pub num_blocks: u32,
    /// Heads in every block.
    pub num_heads: u32,
    /// Tokens a block holds.
    pub block_tokens: u32,
    /// Token rows that can be addressed in a block: `block_tokens`, or 1 where the content holds
    /// all tokens of a block in a form of its own (raw pages).
    pub token_rows: u32,
    /// Contiguous bytes for each (plane, block, head, token row).
    pub content_bytes: u64,
    /// The layers, in model order.
    pub layers: Vec<LayerLayout>,
    /// Names of the layers, for messages.
    pub layer_names: Vec<String>,
    /// Length of each region.
    pub region_bytes: Vec<u64>,
}

/// A checked layout; cheap to clone.
///
/// Invariants: at least one block, head, token row, content byte and layer; every layer has the
/// same number of planes, one or two; all pieces lie inside their region and share no byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout(Arc<KvLayoutParts>);

impl KvLayout {
    /// Checks the parts, whoever made them.
    ///
    /// # Errors
    /// `Layout` when the parts break an invariant of [`KvLayout`]; the message names the layer.
    pub fn from_parts(parts: KvLayoutParts) -> Result<Self> {
        check_counts(&parts)?;
        disjoint::check(&parts)?;
        Ok(Self(Arc::new(parts)))
    }

    /// The plain fields, for encoding.
    pub fn parts(&self) -> &KvLayoutParts {
        &self.0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Blocks in every plane.
    pub fn num_blocks(&self) -> u32 {
        self.0.num_blocks
    }

    /// Heads in every block.
    pub fn num_heads(&self) -> u32 {
        self.0.num_heads
    }

    /// Tokens a block holds.
    pub fn block_tokens(&self) -> u32 {
        self.0.block_tokens
    }

    /// Token rows that can be addressed in a block.
    pub fn token_rows(&self) -> u32 {
        self.0.token_rows
    }

    /// Contiguous bytes for each (plane, block, head, token row).
    pub fn content_bytes(&self) -> u64 {
        self.0.content_bytes
    }

    /// Number of layers.
    pub fn num_layers(&self) -> u32 {
        self.0.layers.len() as u32
    }

    /// Planes in every layer: 1 joined, 2 split.
    pub fn num_planes(&self) -> u32 {
        self.0.layers[0].planes.len() as u32
    }

    /// The layers, in model order.
    pub fn layers(&self) -> &[LayerLayout] {
        &self.0.layers
    }

    /// Names of the layers.
    pub fn layer_names(&self) -> &[String] {
        &self.0.layer_names
    }

    /// Length of each region.
    pub fn region_bytes(&self) -> &[u64] {
        &self.0.region_bytes
    }

    /// Bytes of one block in one plane of one layer.
    pub fn plane_block_bytes(&self) -> u64 {
        self.0.content_bytes * u64::from(self.0.num_heads) * u64::from(self.0.token_rows)
    }

    /// Bytes of one block in one layer, all planes.
    pub fn layer_block_bytes(&self) -> u64 {
        self.plane_block_bytes() * u64::from(self.num_planes())
    }

    /// Bytes of one block over all layers.
    pub fn block_bytes(&self) -> u64 {
        self.layer_block_bytes() * u64::from(self.num_layers())
    }
}

/// Checks everything but places: counts, names, and that no product of sizes overflows.
fn check_counts(parts: &KvLayoutParts) -> Result<()> {
    let counts = [
        ("num_blocks", u64::from(parts.num_blocks)),
        ("num_heads", u64::from(parts.num_heads)),
        ("block_tokens", u64::from(parts.block_tokens)),
        ("content_bytes", parts.content_bytes),
        ("number of layers", parts.layers.len() as u64),
    ];
    for (name, count) in counts {
        if count == 0 {
            return Err(refuse(format!("{name} is `0`")));
        }
    }
    if parts.layers.len() > MAX_LAYERS {
        return Err(refuse(format!(
            "`{}` layers are more than `{MAX_LAYERS}`",
            parts.layers.len()
        )));
    }
    if parts.token_rows != parts.block_tokens && parts.token_rows != 1 {
        return Err(refuse(format!(
            "token_rows `{}` is neither block_tokens `{}` nor 1",
            parts.token_rows, parts.block_tokens
        )));
    }
    if !parts.content_bytes.is_multiple_of(parts.dtype.size_bytes()) {
        return Err(refuse(format!(
            "content of `{}` bytes is not a whole number of `{}` elements",
            parts.content_bytes, parts.dtype
        )));
    }
    if parts.layer_names.len() != parts.layers.len() {
        return Err(refuse(format!(
            "`{}` layers have `{}` names",
            parts.layers.len(),
            parts.layer_names.len()
        )));
    }
    let planes = parts.layers[0].planes.len();
    for (layer, name) in parts.layers.iter().zip(&parts.layer_names) {
        if layer.planes.len() != planes || !(1..=2).contains(&planes) {
            return Err(refuse(format!(
                "layer `{name}` has `{}` planes, the first layer has `{planes}`, 1 or 2 are possible",
                layer.planes.len()
            )));
        }
    }
    let factors = [
        u64::from(parts.num_heads),
        u64::from(parts.token_rows),
        2 * parts.layers.len() as u64,
    ];
    let block = factors
        .iter()
        .try_fold(parts.content_bytes, |product, &factor| product.checked_mul(factor));
    if block
        .and_then(|bytes| bytes.checked_mul(u64::from(parts.num_blocks)))
        .is_none()
    {
        return Err(refuse("the size of the cache is beyond 64 bits"));
    }
    Ok(())
}
