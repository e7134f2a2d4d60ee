//! What a kernel is given: the structs of `cuda/view.cuh`, field by field.
//!
//! `probe.rs` compiles that header and compares. What the fields mean is said there, beside each pointer its shape.

/// A struct that crosses into device code, for the comparison.
#[cfg(test)]
pub(super) struct Crossing {
    pub(super) name: &'static str,
    pub(super) size: usize,
    /// Name, offset, size.
    pub(super) fields: Vec<(&'static str, usize, usize)>,
}

/// A value as it lies in memory.
trait Plain {
    fn put(&self, bytes: &mut Vec<u8>);
}

impl Plain for u32 {
    fn put(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.to_ne_bytes());
    }
}

impl Plain for u64 {
    fn put(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.to_ne_bytes());
    }
}

macro_rules! crossing {
    ($( $(#[$doc:meta])+ $name:ident { $( $field:ident: $type:ty, )+ } )+) => {
        $(
            $(#[$doc])+
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
            #[repr(C)]
            #[expect(missing_docs, reason = "the fields are described in cuda/view.cuh")]
            pub struct $name { $( pub $field: $type, )+ }

            impl Plain for $name {
                fn put(&self, bytes: &mut Vec<u8>) { $( self.$field.put(bytes); )+ }
            }

            impl $name {
                /// The bytes as they lie in memory; there is no padding.
                pub fn to_bytes(&self) -> Vec<u8> {
                    let mut bytes = Vec::with_capacity(size_of::<Self>());
                    self.put(&mut bytes);
                    bytes
                }
            }

            // Explicit fields fill every gap, or `to_bytes` would not be what lies in memory.
            const _: () = assert!(0 $( + size_of::<$type>() )+ == size_of::<$name>());
        )+

        /// The structs as this file lays them out.
        #[cfg(test)]
        pub(super) fn crossings() -> Vec<Crossing> {
            vec![ $( Crossing {
                name: stringify!($name),
                size: size_of::<$name>(),
                fields: vec![ $( (stringify!($field), std::mem::offset_of!($name, $field), size_of::<$type>()), )+ ],
            }, )+ ]
        }
    };
}

crossing! {
    /// Division by a number that is known when the launch is made.
    FastDiv { magic: u64, divisor: u32, unused: u32, }

    /// One plane at the source and the one that it fills: addresses, the logical offset for checksums, and the bytes of a piece.
    Lane { src: u64, dst: u64, logical: u64, bytes: u64, }

    /// One launch. Pointers are device addresses, 0 for none.
    View {
        lanes: u64,
        src_pages: u64,
        dst_pages: u64,
        sums: u64,
        flag: u64,
        arrived: u64,
        flag_value: u64,
        src_page_stride: u64,
        dst_page_stride: u64,
        src_part_stride: u64,
        dst_part_stride: u64,
        outer_src_stride: u64,
        outer_dst_stride: u64,
        outer_logical_stride: u64,
        inner_src_stride: u64,
        inner_dst_stride: u64,
        inner_logical_stride: u64,
        tiles: FastDiv,
        inner: FastDiv,
        outer: FastDiv,
        pages: FastDiv,
        src_parts: FastDiv,
        dst_parts: FastDiv,
        first_page: u32,
        num_lanes: u32,
        num_items: u32,
        tile_bytes: u32,
        stages: u32,
        unused: u32,
    }
}

impl FastDiv {
    /// Division by `divisor`; 0 counts as 1.
    pub fn by(divisor: u32) -> Self {
        let divisor = divisor.max(1);
        Self {
            // ceil(2^64 / divisor): the product's upper half is exact for all dividends of 32 bits.
            magic: if divisor == 1 {
                0
            } else {
                u64::MAX / u64::from(divisor) + 1
            },
            divisor,
            unused: 0,
        }
    }

    /// What the kernels compute.
    pub fn divide(self, dividend: u32) -> u32 {
        match self.magic {
            0 => dividend,
            magic => ((u128::from(magic) * u128::from(dividend)) >> 64) as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn division_is_exact(divisor in 1_u32.., dividend in any::<u32>(), near in 0_u32..3) {
            let fast = FastDiv::by(divisor);
            // Multiples and their neighbours are where a rounded magic number would be off by one.
            let edge = (dividend / divisor * divisor).wrapping_add(near).wrapping_sub(1);
            for dividend in [dividend, edge, u32::MAX, 0] {
                prop_assert_eq!(fast.divide(dividend), dividend / divisor);
            }
        }
    }

    #[test]
    fn division_by_powers_of_two_and_their_neighbours() {
        for shift in 0..32 {
            for divisor in [(1_u32 << shift).wrapping_sub(1), 1 << shift, (1 << shift) + 1] {
                let divisor = divisor.max(1);
                for dividend in [
                    0,
                    1,
                    divisor - 1,
                    divisor,
                    divisor.wrapping_add(1),
                    u32::MAX - 1,
                    u32::MAX,
                ] {
                    assert_eq!(FastDiv::by(divisor).divide(dividend), dividend / divisor);
                }
            }
        }
    }
}
