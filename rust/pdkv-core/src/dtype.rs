//! Element types: names as torch spells them, sizes, and codes that are stable on the wire.
//!
//! Bytes are moved, never interpreted; the dtype is part of what a layout *means*, so that two
//! caches with equal sizes and different elements are told apart.

use std::fmt;
use std::str::FromStr;

use crate::{Error, ErrorKind};

macro_rules! dtypes {
    ($( $(#[doc = $doc:literal])+ $name:ident = $code:literal, $size:literal, $text:literal $(, $alias:literal)*; )+) => {
        /// The element type of a cache. The discriminant is the code on the wire and never changes meaning.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[repr(u8)]
        pub enum DType { $( $(#[doc = $doc])+ $name = $code, )+ }

        impl DType {
            /// Every dtype, in table order.
            pub const ALL: &'static [Self] = &[ $( Self::$name, )+ ];

            /// Bytes of one element.
            pub const fn size_bytes(self) -> u64 { match self { $( Self::$name => $size, )+ } }

            /// The name as torch spells it, without the `torch.` prefix.
            pub const fn as_str(self) -> &'static str { match self { $( Self::$name => $text, )+ } }

            /// The dtype for a code read from the wire; `None` when this release doesn't know it.
            pub const fn from_code(code: u32) -> Option<Self> {
                match code { $( $code => Some(Self::$name), )+ _ => None }
            }

            fn from_name(name: &str) -> Option<Self> {
                match name { $( $text $( | $alias )* => Some(Self::$name), )+ _ => None }
            }
        }
    };
}

dtypes! {
    /// Bytes without a type: raw pages.
    Raw = 0, 1, "raw", "bytes";
    /// IEEE half.
    F16 = 1, 2, "float16", "half", "f16", "fp16";
    /// bfloat16.
    BF16 = 2, 2, "bfloat16", "bf16";
    /// IEEE single.
    F32 = 3, 4, "float32", "float", "f32", "fp32";
    /// IEEE double.
    F64 = 4, 8, "float64", "double", "f64", "fp64";
    /// fp8, 4 exponent bits, finite only (the common one).
    F8E4M3 = 5, 1, "float8_e4m3fn", "fp8", "fp8_e4m3", "f8e4m3";
    /// fp8, 5 exponent bits.
    F8E5M2 = 6, 1, "float8_e5m2", "fp8_e5m2", "f8e5m2";
    /// fp8, 4 exponent bits, no negative zero (ROCm).
    F8E4M3Fnuz = 7, 1, "float8_e4m3fnuz", "f8e4m3fnuz";
    /// fp8, 5 exponent bits, no negative zero (ROCm).
    F8E5M2Fnuz = 8, 1, "float8_e5m2fnuz", "f8e5m2fnuz";
    /// Unsigned 8 bit.
    U8 = 9, 1, "uint8", "u8";
    /// Signed 8 bit.
    I8 = 10, 1, "int8", "i8";
    /// Signed 16 bit.
    I16 = 11, 2, "int16", "short", "i16";
    /// Signed 32 bit.
    I32 = 12, 4, "int32", "int", "i32";
    /// Signed 64 bit.
    I64 = 13, 8, "int64", "long", "i64";
    /// Unsigned 16 bit.
    U16 = 14, 2, "uint16", "u16";
    /// Unsigned 32 bit.
    U32 = 15, 4, "uint32", "u32";
    /// Unsigned 64 bit.
    U64 = 16, 8, "uint64", "u64";
    /// One byte, zero or one.
    Bool = 17, 1, "bool";
}

impl DType {
    /// The code on the wire.
    pub const fn code(self) -> u32 {
        self as u32
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let name = text.strip_prefix("torch.").unwrap_or(text);
        Self::from_name(name).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|dtype| dtype.as_str()).collect();
            Error::new(ErrorKind::Layout, "dtype", format!("unknown dtype `{text}`"))
                .with_hint(format!("one of {}", known.join(", ")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_come_back() {
        for &dtype in DType::ALL {
            assert_eq!(dtype.as_str().parse::<DType>().unwrap(), dtype);
            assert_eq!(format!("torch.{dtype}").parse::<DType>().unwrap(), dtype);
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
        }
        assert_eq!(DType::from_code(255), None);
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let error = "float7".parse::<DType>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Layout);
        assert!(error.message().contains("`float7`") && error.hint().unwrap().contains("float8_e4m3fn"));
    }
}
