//! What the bytes of a cache mean, apart from where they lie.
//!
//! Two caches can exchange bytes unchanged exactly when their meanings are equal; the fingerprint
//! of a cache is made from this, and a refused handshake lists the differences.

use std::fmt;

use super::KvLayout;
use crate::dtype::DType;

/// What the bytes mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Meaning {
    /// Element type.
    pub dtype: DType,
    /// Layers.
    pub num_layers: u32,
    /// Heads in every block.
    pub num_heads: u32,
    /// Tokens a block holds.
    pub block_tokens: u32,
    /// Token rows that can be addressed in a block.
    pub token_rows: u32,
    /// Contiguous bytes for each (plane, block, head, token row).
    pub content_bytes: u64,
    /// 1 when K and V are joined, 2 when split.
    pub planes: u32,
}

/// One field in which two meanings differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Name of the field.
    pub field: &'static str,
    /// Our value.
    pub ours: String,
    /// Their value.
    pub theirs: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is `{}` here and `{}` there", self.field, self.ours, self.theirs)
    }
}

impl Meaning {
    fn fields(&self) -> [(&'static str, u64); 7] {
        [
            ("dtype", u64::from(self.dtype.code())),
            ("num_layers", u64::from(self.num_layers)),
            ("num_heads", u64::from(self.num_heads)),
            ("block_tokens", u64::from(self.block_tokens)),
            ("token_rows", u64::from(self.token_rows)),
            ("content_bytes", self.content_bytes),
            ("planes", u64::from(self.planes)),
        ]
    }

    /// Every field in which `theirs` differs from this one.
    pub fn differences(&self, theirs: &Self) -> Vec<Difference> {
        let show = |meaning: &Self, field: &str, value: u64| match field {
            "dtype" => meaning.dtype.to_string(),
            _ => value.to_string(),
        };
        self.fields()
            .into_iter()
            .zip(theirs.fields())
            .filter(|(ours, theirs)| ours != theirs)
            .map(|((field, ours), (_, other))| Difference {
                field,
                ours: show(self, field, ours),
                theirs: show(theirs, field, other),
            })
            .collect()
    }
}

impl KvLayout {
    /// What the bytes mean.
    pub fn meaning(&self) -> Meaning {
        Meaning {
            dtype: self.dtype(),
            num_layers: self.num_layers(),
            num_heads: self.num_heads(),
            block_tokens: self.block_tokens(),
            token_rows: self.token_rows(),
            content_bytes: self.content_bytes(),
            planes: self.num_planes(),
        }
    }

    /// Every field in which the meaning of `theirs` differs.
    pub fn differences(&self, theirs: &Self) -> Vec<Difference> {
        self.meaning().differences(&theirs.meaning())
    }

    /// The bytes that stand for the meaning in a fingerprint; equal for equal meanings only.
    pub fn fingerprint_input(&self) -> Vec<u8> {
        let mut bytes = b"pdkv-layout-1".to_vec();
        bytes.extend(
            self.meaning()
                .fields()
                .iter()
                .flat_map(|(_, value)| value.to_le_bytes()),
        );
        bytes
    }

    /// One line about meaning and place.
    pub fn describe(&self) -> String {
        let first = &self.layers()[0];
        format!(
            "{} layers x {} blocks x {} heads x {} tokens of {} {} bytes, {}, {} regions, \
             first layer strides block {} head {} token {}",
            self.num_layers(),
            self.num_blocks(),
            self.num_heads(),
            self.block_tokens(),
            self.content_bytes(),
            self.dtype(),
            if self.num_planes() == 1 {
                "one plane"
            } else {
                "K and V apart"
            },
            self.region_bytes().len(),
            first.block_stride,
            first.head_stride,
            first.token_stride,
        )
    }
}
