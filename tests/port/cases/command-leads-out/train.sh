axolotl train ../../elsewhere.yaml
