//! Which part of the whole model a cache holds: layers of a pipeline stage, heads of a tensor rank.
//!
//! A shard says nothing about memory; [`KvLayout`] does that. The two are compared when a cache is
//! registered, and shards of two peers are compared at the handshake.

use crate::layout::KvLayout;
use crate::{Error, ErrorKind, Result};

/// The layers, heads and ranks one cache holds of the whole model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    /// First layer of the model held here.
    pub first_layer: u32,
    /// Layers held here.
    pub num_layers: u32,
    /// Layers of the whole model.
    pub total_layers: u32,
    /// First KV head of the model held here.
    pub first_head: u32,
    /// KV heads held here. Ranks may hold the same heads (replication).
    pub num_heads: u32,
    /// KV heads of the whole model.
    pub total_heads: u32,
    /// Tensor-parallel rank.
    pub tp_rank: u32,
    /// Tensor-parallel size.
    pub tp_size: u32,
    /// Pipeline-parallel rank.
    pub pp_rank: u32,
    /// Pipeline-parallel size.
    pub pp_size: u32,
}

impl Default for Shard {
    /// The whole of a model with one layer and one head.
    fn default() -> Self {
        Self::whole(1, 1)
    }
}

impl Shard {
    /// The whole model in one cache.
    pub const fn whole(num_layers: u32, num_heads: u32) -> Self {
        Self {
            first_layer: 0,
            num_layers,
            total_layers: num_layers,
            first_head: 0,
            num_heads,
            total_heads: num_heads,
            tp_rank: 0,
            tp_size: 1,
            pp_rank: 0,
            pp_size: 1,
        }
    }

    /// Checks the shard against itself.
    ///
    /// # Errors
    /// `Layout` when a range is empty or leaves the model, or a rank is not below its size.
    pub fn validate(&self) -> Result<()> {
        let range = |what: &str, first: u32, num: u32, total: u32| {
            if num == 0 || u64::from(first) + u64::from(num) > u64::from(total) {
                return Err(Error::new(
                    ErrorKind::Layout,
                    "shard",
                    format!("`{num}` {what}s from `{first}` are not a part of `{total}` {what}s"),
                ));
            }
            Ok(())
        };
        range("layer", self.first_layer, self.num_layers, self.total_layers)?;
        range("head", self.first_head, self.num_heads, self.total_heads)?;
        for (what, rank, size) in [("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size)] {
            if rank >= size {
                return Err(Error::new(
                    ErrorKind::Layout,
                    "shard",
                    format!("{what}_rank `{rank}` is not below {what}_size `{size}`"),
                ));
            }
        }
        Ok(())
    }

    /// Checks the shard against itself and against the layout of the cache it describes.
    ///
    /// # Errors
    /// `Layout` as [`Shard::validate`], or when the layout has other numbers of layers or heads.
    pub fn validate_for(&self, layout: &KvLayout) -> Result<()> {
        self.validate()?;
        let pairs = [
            ("layers", self.num_layers, layout.num_layers()),
            ("heads", self.num_heads, layout.num_heads()),
        ];
        for (what, stated, found) in pairs {
            if stated != found {
                return Err(Error::new(
                    ErrorKind::Layout,
                    "shard",
                    format!("the shard states `{stated}` {what} but the tensors have `{found}`"),
                ));
            }
        }
        Ok(())
    }

    /// The bytes that stand for this shard in a fingerprint: what is held, not by which rank.
    pub fn fingerprint_input(&self) -> Vec<u8> {
        let fields = [
            self.first_layer,
            self.num_layers,
            self.total_layers,
            self.first_head,
            self.num_heads,
            self.total_heads,
        ];
        let mut bytes = b"pdkv-shard-1".to_vec();
        bytes.extend(fields.iter().flat_map(|field| field.to_le_bytes()));
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_ranks_are_checked() {
        assert!(Shard::default().validate().is_ok());
        let whole = Shard::whole(80, 8);
        for bad in [
            Shard {
                num_layers: 0,
                ..whole.clone()
            },
            Shard {
                first_layer: 1,
                ..whole.clone()
            },
            Shard {
                first_head: u32::MAX,
                ..whole.clone()
            },
            Shard {
                tp_rank: 1,
                ..whole.clone()
            },
            Shard {
                pp_size: 0,
                ..whole.clone()
            },
        ] {
            assert_eq!(bad.validate().unwrap_err().kind(), ErrorKind::Layout, "{bad:?}");
        }
    }

    #[test]
    fn ranks_that_hold_the_same_heads_have_equal_fingerprints() {
        let first = Shard {
            tp_size: 2,
            ..Shard::whole(60, 1)
        };
        let second = Shard {
            tp_rank: 1,
            ..first.clone()
        };
        assert_eq!(first.fingerprint_input(), second.fingerprint_input());
        assert_ne!(first.fingerprint_input(), Shard::whole(61, 1).fingerprint_input());
    }
}
