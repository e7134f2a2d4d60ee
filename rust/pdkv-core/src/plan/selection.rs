//! Which part of a cache a plan is about.

use super::refuse;
use crate::Result;
use crate::layout::KvLayout;

/// A part of a cache: a range of its layers, by index in the layout.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Selection {
    /// First layer.
    pub first_layer: u32,
    /// Number of layers, at least 1.
    pub num_layers: u32,
}

impl Selection {
    /// `num_layers` layers from `first_layer`.
    pub const fn layers(first_layer: u32, num_layers: u32) -> Self {
        Self {
            first_layer,
            num_layers,
        }
    }

    /// All layers of a layout.
    pub fn all(layout: &KvLayout) -> Self {
        Self::layers(0, layout.num_layers())
    }

    /// Checks the selection against a layout.
    ///
    /// # Errors
    /// `Layout` when it selects nothing or leaves the layout.
    pub fn validate(&self, layout: &KvLayout) -> Result<()> {
        let end = u64::from(self.first_layer) + u64::from(self.num_layers);
        if self.num_layers == 0 || end > u64::from(layout.num_layers()) {
            return Err(refuse(format!(
                "`{}` layers from `{}` are not a part of the `{}` layers of the cache",
                self.num_layers,
                self.first_layer,
                layout.num_layers()
            )));
        }
        Ok(())
    }
}
